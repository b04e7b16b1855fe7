"""Size of a model's recurrent state, as counted in the papers."""

from sympow_jax import config as config_lib
from sympow_jax.layers.attention import kernels

__all__ = ["state_bytes"]

FEATURE_MAPS = ("symmetric", "tensor")


def state_bytes(
    config: config_lib.ModelConfig,
    *,
    bytes_per_element: int = 2,
    feature_map: str = "symmetric",
    normalizer: bool = True,
) -> int:
    """Returns the bytes of a row's state, which has kv_heads * (F * E + Z) elements in each layer.

    F is the exact number of features, whatever the layout that stores them. For power attention, it is
    binomial(D + p - 1, p) for the symmetric power and D^p for the `tensor` power ("Symmetric Power Transformers",
    Buckman, Gelada, Zhang 2024, sections 3 and 4). For the kernel `linear`, it is the number of features after their
    rotation.

    Z is the number of elements of the normalizer. Z = F, with three exceptions: an unrotated normalizer has the number
    of features before their rotation, per-channel gates have Z = F * E, and the delta rule has none.

    The state of a sliding window of w tokens is the keys and values of w - 1 of them.

    Args:
        config: settings of the model.
        bytes_per_element: bytes per element.
        feature_map: `symmetric` or `tensor`, for power attention.
        normalizer: whether to count Z.

    Raises:
        ValueError: a layer has no state of a fixed size (softmax without a window, and expressive attention).
    """
    if feature_map not in FEATURE_MAPS:
        raise ValueError(f"feature_map is {feature_map!r}; it must be one of {', '.join(FEATURE_MAPS)}")
    return sum(
        kernels.from_config(config, layer).state_bytes(
            bytes_per_element=bytes_per_element, feature_map=feature_map, normalizer=normalizer
        )
        for layer in range(config.layers)
    )
