"""How large the recurrent state of a model is, as the papers count it."""

from sympow_jax import config as configs
from sympow_jax.layers import positions
from sympow_jax.ops import feature_maps

__all__ = ["state_bytes"]

FEATURE_MAPS = ("symmetric", "tensor")


def state_bytes(
    config: configs.ModelConfig,
    *,
    bytes_per_element: int = 2,
    feature_map: str = "symmetric",
    normaliser: bool = True,
) -> int:
    """Bytes of layers * kv_heads * (F * E + Z) elements, Z those of the normaliser, which may be left out.

    F is the exact number of features, whatever layout stores them: binomial(D + p - 1, p) for the symmetric
    power, D^p for the `tensor` power ("Symmetric Power Transformers", Buckman, Gelada, Zhang 2024, sections
    3 and 4); for a linear kernel that of its feature map, as positions turn it. Z = F, but F before the turn where
    the normaliser is unrotated, and F * E for gates by channel. Raises ValueError for softmax and expressive
    attention, which have no state of a fixed size.
    """
    attention = config.attention
    if feature_map not in FEATURE_MAPS:
        raise ValueError(f"feature_map is {feature_map!r}; it must be one of {', '.join(FEATURE_MAPS)}")
    if attention.kernel in ("softmax", "expressive"):
        raise ValueError(
            f"kernel {attention.kernel!r} has no recurrent state; its keys and values grow with the context"
        )
    kv_heads, head_dim = config.kv_heads, config.head_dim
    assert kv_heads is not None  # ModelConfig derives what is not given
    assert head_dim is not None
    if attention.kernel == "power":
        size = positions.compared_dim(config)
        symmetric = feature_maps.symmetric_power_dim(size, attention.power)
        features = unturned = symmetric if feature_map == "symmetric" else size**attention.power
    else:
        unturned = positions.features_dim(config)
        features = positions.turned_dim(config) or unturned
    normalisers = features if attention.normaliser == "rotated" else unturned
    if attention.decay.startswith("channel"):
        normalisers *= head_dim
    elements = features * head_dim + (normalisers if normaliser else 0)
    return config.layers * kv_heads * elements * bytes_per_element
