"""How large the recurrent state of a model is, as the papers count it."""

from sympow_jax import config as configs
from sympow_jax.layers.attention import kernels

__all__ = ["state_bytes"]

FEATURE_MAPS = ("symmetric", "tensor")


def state_bytes(
    config: configs.ModelConfig,
    *,
    bytes_per_element: int = 2,
    feature_map: str = "symmetric",
    normalizer: bool = True,
) -> int:
    """Bytes of layers * kv_heads * (F * E + Z) elements, Z those of the normalizer, which may be left out.

    F is the exact number of features, whatever layout stores them: binomial(D + p - 1, p) for the symmetric
    power, D^p for the `tensor` power ("Symmetric Power Transformers", Buckman, Gelada, Zhang 2024, sections
    3 and 4); for a linear kernel that of its feature map, as positions turn it. Z = F, but F before the turn where
    the normalizer is unrotated, and F * E for gates by channel. Raises ValueError for softmax and expressive
    attention, which have no state of a fixed size.
    """
    if feature_map not in FEATURE_MAPS:
        raise ValueError(f"feature_map is {feature_map!r}; it must be one of {', '.join(FEATURE_MAPS)}")
    kernel = kernels.from_config(config)
    return config.layers * kernel.state_bytes(
        bytes_per_element=bytes_per_element, feature_map=feature_map, normalizer=normalizer
    )
