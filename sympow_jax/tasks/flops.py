"""Model FLOPs of training and peak FLOPs of devices, whose ratio is the MFU."""

import jax

from sympow_jax import config
from sympow_jax.config import model as model_lib
from sympow_jax.layers import mlp
from sympow_jax.layers.attention import decays, kernels, positions

PASSES = 3
"""Cost of both passes in forward passes: the backward pass of a product A B has two of its size, dA and dB."""

# Dense bfloat16 FLOP/s without sparsity, by words of a `device_kind`. The first row whose words all occur is used.
# Source: NVIDIA's data sheet of each product, whose figures with sparsity are twice these.
_PEAKS: tuple[tuple[tuple[str, ...], float], ...] = (
    (("H100", "PCIe"), 756e12),
    (("H100", "NVL"), 835e12),
    (("H100",), 989e12),  # SXM
    (("H800",), 989e12),
    (("H200", "NVL"), 835e12),
    (("H200",), 989e12),
    (("GH200",), 989e12),
    (("H20",), 148e12),
    (("GB200",), 2500e12),
    (("B200",), 2250e12),
    (("A100",), 312e12),
    (("A800",), 312e12),
    (("A40",), 149.7e12),
    (("A30",), 165e12),
    (("A10",), 125e12),
    (("L40S",), 362e12),
    (("L40",), 181e12),
    (("L4",), 121e12),
)


def model_flops_per_token(
    model: config.ModelConfig, context_length: int, *, unembedded: float = 1.0
) -> float:
    """Returns the training FLOPs per token or patch, both passes, averaged over a full context.

    `unembedded` is the fraction of the tokens for which logits of the vocabulary are computed.

    These are "model FLOPs" in the sense of PaLM (Chowdhery et al. 2022, appendix B): the FLOPs that the mathematics
    needs. They exclude recomputation (rematerialization, scores in the backward pass) and masked pairs. Conventions:

    * A multiplication with its addition counts as two. The backward pass is twice the forward pass.
    * Matrix products take 6 FLOPs per weight. They are the projections, those of gates included, the feed-forward
      layers, the embedding of patches and the unembedding, tied or not. If only masked tokens are predicted, only these
      are unembedded. Biases, embedding lookups, norms, activations, rotations, softmax, the head of a row and the
      optimizer are not counted.
    * Attention by pairs (softmax, and `form` "attention"): 2 (D + E) for each of the T / 2 causal pairs per token of a
      query head, or T pairs if bidirectional. With a window of w < T tokens, w - w^2 / 2 T pairs.
    * Attention by features: 2 F E for every key head, which updates a state, and for every query head, which reads
      one. If causal, also 2 (D + E) for each of C / 2 + W pairs. F is the exact number of features, without padding.
      C is `chunk_size`, 128 by default and 1 if recurrent. W is `exact_window`. The normalizer is not counted, except
      that per-channel gates have one as large as the state. A linear kernel has F = D. If features are rotated, pairs
      multiply rotated features, so D is their number.
    * If no form is set, the cheaper of the two counts, whatever the device would choose.
    """
    layers = sum(attention(model, layer, context_length) for layer in range(model.layers))
    outside = model.width * unembedded * model.vocab_size
    if model.patch_size is not None:
        outside += model.width * model.patch_size**2 * model_lib.CHANNELS
    return PASSES * (layers + feed_forward(model) + 2 * outside)


def feed_forward(model: config.ModelConfig) -> float:
    """Returns the FLOPs per token of a forward pass of all feed-forward layers."""
    return 2 * model.layers * mlp.num_weights(model)


def attention(model: config.ModelConfig, layer: int, context_length: int) -> float:
    """Returns the FLOPs per token of a forward pass of a layer's attention with its projections."""
    kernel = kernels.from_config(model, layer)
    # Of decays, rotation rates, write strengths and gates alongside a window that are projections of a token.
    gates = decays.make(kernel).num_projected
    gates += positions.num_rates(kernel.attention, kernel.position_dim) * kernel.num_kv_heads
    gates += kernel.num_kv_heads if kernel.largest_delta else 0
    gates += 2 * kernel.num_heads if kernel.window_kernel is not None else 0
    columns = 2 * (kernel.num_heads + kernel.num_kv_heads) * kernel.head_dim + gates
    return 2 * model.width * columns + kernel.flops_per_token(context_length)


def peak_flops(device: jax.Device) -> float | None:
    """Returns the dense bfloat16 FLOP/s of a device by its data sheet.

    MFU is relative to this peak whatever the model's dtype, as is usual. Float32 models cannot come near it.

    Returns:
        The peak; None for CPUs, parts of a GPU (MIG) and unknown devices.
    """
    words = device.device_kind.replace("-", " ").split()
    if "MIG" in words:
        return None
    return next((peak for names, peak in _PEAKS if all(name in words for name in names)), None)
