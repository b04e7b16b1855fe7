"""What training costs by the mathematics, and what a device could do at most: MFU is the ratio of the two."""

import jax

from sympow_jax import config
from sympow_jax.config import attention as attention_lib
from sympow_jax.layers.attention import kernels, positions

__all__ = ["model_flops_per_token", "peak_flops"]

# Of both passes, in forward passes: each product A B has two of its size in the backward pass, dA and dB.
_PASSES = 3

# Dense bfloat16 FLOPs a second without sparsity, by the words of a `device_kind`; the first row whose words all occur
# counts. Source: NVIDIA's data sheets of each product, whose figures with sparsity are twice these.
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
    model: config.ModelConfig, context_length: int, task: config.TaskConfig | None = None
) -> float:
    """FLOPs of training on one token, or patch, of a full context, both passes, averaged over the context.

    "Model FLOPs" in the sense of PaLM (Chowdhery et al. 2022, appendix B): what the mathematics needs, whatever the
    device computes twice (rematerialization, scores in the backward pass) or in vain (masked pairs). Conventions:

    * a multiplication with its addition is two; the backward pass is twice the forward pass;
    * matrix products of the projections, of decays and rotation rates, of the feed-forward, of the embedding of
      patches and of the tied unembedding, of masked tokens where these alone are predicted: 6 FLOPs a weight. Looking
      up embeddings is free, as are norms, activations, rotations, softmax, the head of a row and the optimizer;
    * attention by pairs: 2 (D + E) for each of T / 2 causal pairs of a query head, or of T that see the whole context,
      softmax and `form` "attention";
    * attention by features: 2 F E for every key head, which updates a state, and for every query head, which reads
      one, and if causal 2 (D + E) for each of C / 2 + W pairs; F features, the exact number without padding, C
      `chunk_size`, 128 unless given and 1 if recurrent, W `exact_window`; no normalizer. A linear kernel has F = D;
      where features are turned, pairs compare as many numbers as there are turned features; gates by channel have a
      normalizer as large as the state;
    * where no form is named, the cheaper of the two, whatever the device would choose.
    """
    width, heads, kv_heads, size = model.width, model.heads, model.kv_heads, model.head_dim
    assert kv_heads is not None  # ModelConfig derives what is not given
    assert size is not None
    decay = model.attention.decay_kind
    gates = 0
    if decay.source is attention_lib.DecaySource.DATA:
        gates += size if decay.per_channel else 1
    kernel = kernels.from_config(model)
    gates += positions.num_rates(model.attention, kernel.position_dim)
    weights = 2 * (heads + kv_heads) * size + gates * kv_heads + 2 * model.mlp_ratio * width
    task = task or config.TaskConfig()
    outside = {"next_token": 1.0, "masked_token": task.mask_fraction}.get(task.name, 0.0) * model.vocab_size
    if model.patch_size is not None:
        outside += model.patch_size**2 * model.channels
    dense = 2 * width * (model.layers * weights + outside)
    return _PASSES * (dense + model.layers * kernel.flops_per_token(context_length))


def peak_flops(device: jax.Device) -> float | None:
    """Dense bfloat16 FLOPs a second of a device by its data sheet; None for CPUs, parts of a GPU (MIG) and devices
    that are not known here.

    MFU is relative to this peak whatever the model's dtype, as is the custom: float32 models cannot come near it.
    """
    words = device.device_kind.replace("-", " ").split()
    if "MIG" in words:
        return None
    return next((peak for names, peak in _PEAKS if all(name in words for name in names)), None)
