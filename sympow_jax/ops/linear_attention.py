"""Linear attention with a positive feature map: the weight of key j for query i is phi(q_i) . phi(k_j).

"Transformers are RNNs" (Katharopoulos et al. 2020). It is power attention of mapped queries and keys with power 1,
and shares its forms, windows and states; the state's features are phi's.
"""

from sympow_jax.array_types import Array, Float, Int
from sympow_jax.ops import feature_maps
from sympow_jax.ops._power import dispatch
from sympow_jax.ops._power import state as power_state

__all__ = ["linear_attention", "linear_attention_step"]

FEATURE_MAPS = {"elu": feature_maps.elu_plus_one}


def linear_attention(
    query: Float[Array, "B T N D"],
    key: Float[Array, "B S K D"],
    value: Float[Array, "B S K E"],
    *,
    feature_map: str = "elu",
    log_decay: Float[Array, "B S K"] | None = None,
    segment_ids: Int[Array, "B S"] | None = None,
    form: str | None = None,
    implementation: str | None = None,
    chunk_size: int | None = None,
    window: int = 64,
    initial_state: power_state.PowerState | None = None,
    return_state: bool = False,
    axis_name: str | None = None,
) -> Float[Array, "B T N E"] | tuple[Float[Array, "B T N E"], power_state.PowerState]:
    """Causal linear attention, weights exp(G_i - G_j) phi(q_i) . phi(k_j); the rest as `power_attention`.

    `feature_map`: `elu` is elu(x) + 1. States are made by `PowerState.zeros(..., power=1)`.
    """
    phi = _feature_map(feature_map)
    return dispatch.attend(
        phi(query),
        phi(key),
        value,
        power=1,
        log_decay=log_decay,
        segment_ids=segment_ids,
        form=form,
        implementation=implementation,
        chunk_size=chunk_size,
        window=window,
        initial_state=initial_state,
        return_state=return_state,
        axis_name=axis_name,
    )


def linear_attention_step(
    query: Float[Array, "B N D"],
    key: Float[Array, "B K D"],
    value: Float[Array, "B K E"],
    state: power_state.PowerState,
    *,
    feature_map: str = "elu",
    log_decay: Float[Array, "B K"] | None = None,
    segment_ids: Int[Array, " B"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B N E"], power_state.PowerState]:
    """`linear_attention` for the next token of each row; returns its output and the state behind it."""
    phi = _feature_map(feature_map)
    return dispatch.attend_step(
        phi(query),
        phi(key),
        value,
        state,
        power=1,
        log_decay=log_decay,
        segment_ids=segment_ids,
        implementation=implementation,
    )


def _feature_map(name: str):
    if name not in FEATURE_MAPS:
        raise ValueError(f"feature_map is {name!r}; it must be one of {', '.join(FEATURE_MAPS)}")
    return FEATURE_MAPS[name]
