"""How large the recurrent state of a model is, as the papers count it."""

from sympow_jax import config as configs
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
    """Bytes of layers * kv_heads * F * (E + 1) elements, F * E without the normaliser.

    F is the exact number of features, whatever layout stores them: binomial(D + p - 1, p) for the symmetric
    power, D^p for the `tensor` power ("Symmetric Power Transformers", Buckman, Gelada, Zhang 2024, sections
    3 and 4), D for a linear kernel. Raises ValueError for softmax, which has no state of a fixed size.
    """
    attention = config.attention
    if feature_map not in FEATURE_MAPS:
        raise ValueError(f"feature_map is {feature_map!r}; it must be one of {', '.join(FEATURE_MAPS)}")
    if attention.kernel == "softmax":
        raise ValueError("kernel 'softmax' has no recurrent state; its keys and values grow with the context")
    kv_heads, head_dim = config.kv_heads, config.head_dim
    assert kv_heads is not None  # ModelConfig derives what is not given
    assert head_dim is not None
    features = head_dim
    if attention.kernel == "power":
        symmetric = feature_maps.symmetric_power_dim(head_dim, attention.power)
        features = symmetric if feature_map == "symmetric" else head_dim**attention.power
    columns = head_dim + 1 if normaliser else head_dim
    return config.layers * kv_heads * features * columns * bytes_per_element
