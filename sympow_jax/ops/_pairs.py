"""What attention that compares all pairs of queries and keys asks of its arguments."""

__all__ = ["check"]


def check(query, key, value, log_decay, segment_ids, *, causal: bool) -> None:
    """Raises ValueError for shapes that do not fit each other, and for decays without a direction."""
    batch, time, heads, head_dim = query.shape
    key_time, kv_heads = key.shape[1:3]
    if key.shape != (batch, key_time, kv_heads, head_dim) or value.shape[:-1] != key.shape[:-1]:
        raise ValueError(
            f"query is {query.shape}, key {key.shape} and value {value.shape}; they must be "
            f"[B, T, N, D], [B, S, K, D] and [B, S, K, E]"
        )
    if heads % kv_heads:
        raise ValueError(f"query has {heads} heads and key {kv_heads}; the second must divide the first")
    if not 1 <= time <= key_time:
        raise ValueError(
            f"query has {time} positions and key {key_time}; pass at least 1 and at most as many"
        )
    if log_decay is not None and log_decay.shape != (batch, key_time, kv_heads):
        raise ValueError(f"log_decay is {log_decay.shape}; it must be {(batch, key_time, kv_heads)}")
    if segment_ids is not None and segment_ids.shape != (batch, key_time):
        raise ValueError(f"segment_ids is {segment_ids.shape}; it must be {(batch, key_time)}")
    if log_decay is not None and not causal:
        raise ValueError(
            "log_decay is given and causal is False; decays run in one direction: leave one of them out"
        )
