"""Size of a model's recurrent state, as counted in the papers."""

from sympow_jax import config as config_lib
from sympow_jax.layers.attention import kernels


def state_bytes(config: config_lib.ModelConfig, *, bytes_per_element: int = 2) -> int:
    """Returns the bytes of a row's state, which has kv_heads * (F * E + Z) elements in each layer.

    F is the exact number of features, whatever the layout that stores them. For power attention, it is
    binomial(D + p - 1, p) ("Symmetric Power Transformers", Buckman, Gelada, Zhang 2024, section 4). For the kernel
    `linear`, it is the number of features after their rotation.

    Z is the number of elements of the normalizer. Z = F, with three exceptions: an unrotated normalizer has the number
    of features before their rotation, per-channel gates have Z = F * E, and the delta rule has none.

    The state of a window of w tokens, alone or alongside power attention, is the keys and values of w - 1 of them.

    Args:
        config: settings of the model.
        bytes_per_element: bytes per element.

    Raises:
        ValueError: a layer has no state of a fixed size (softmax without a window, and expressive attention).
    """
    return sum(
        kernels.from_config(config, layer).state_bytes(bytes_per_element=bytes_per_element)
        for layer in range(config.layers)
    )
