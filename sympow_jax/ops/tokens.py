"""Arrays of attention, which travel together from an op's entry to its form."""

from typing import NamedTuple

from sympow_jax.array_types import Array, Float, Int
from sympow_jax.ops import arguments


class Tokens(NamedTuple):
    """T queries, and S keys of which these are the last; or those of one token of each row, without an axis of time.

    Attributes:
        log_decay: logarithms of the decays, one per key head or one per value channel; None for no decay.
        segment_ids: ids of documents, negative for padding; None if all tokens belong to one document.
    """

    query: Float[Array, "B T N D"]
    key: Float[Array, "B S K D"]
    value: Float[Array, "B S K E"]
    log_decay: Float[Array, "B S K *channels"] | None
    segment_ids: Int[Array, "B S"] | None

    @classmethod
    def of(cls, query, key, value, log_decay, segment_ids) -> "Tokens":
        """Returns the arguments of an op as JAX arrays.

        Raises:
            ValueError: an argument is not an array, or segment ids do not fit in int32.
        """
        return cls(
            *arguments.to_arrays(
                query=query, key=key, value=value, log_decay=log_decay, segment_ids=segment_ids
            )
        )


# Axes of the arrays, for `sharding.op`.
SEQUENCE = Tokens("B T N D", "B S K D", "B S K E", "B S K", "B S")  # type: ignore[arg-type]
ONE = Tokens("B N D", "B K D", "B K E", "B K", "B")  # type: ignore[arg-type]
