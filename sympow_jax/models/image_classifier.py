"""Image classifier with bidirectional attention over patches."""

import jax.numpy as jnp
from flax import nnx

from sympow_jax import config as config_lib
from sympow_jax.array_types import Array, Float
from sympow_jax.config import model as model_lib
from sympow_jax.layers import initializers
from sympow_jax.models import head, trunk


class ImageClassifier(trunk.Trunk):
    """Blocks over the patches of an image, in row order, and a linear layer on their mean.

    DeiT (Touvron et al. 2021) reads classes from an additional class token instead. It also has learned absolute
    positions and biases in projections, which settings can select here too. Matrix products are in `config.dtype`.
    Parameters, the residual stream and the head are float32.
    """

    def __init__(
        self,
        config: config_lib.ModelConfig,
        task: config_lib.TaskConfig,
        *,
        rngs: nnx.Rngs | int,
        **form: bool,
    ):
        assert config.patch_size is not None  # `Config` requires it for images
        assert task.outputs is not None
        self.patch_size = config.patch_size
        rngs = initializers.as_rngs(rngs)
        super().__init__(config, rngs=rngs, **form)
        self.head = head.Head(config, task.outputs, rngs=rngs)

    def _init_embedding(self, rngs):
        values, dtype = self.patch_size**2 * model_lib.CHANNELS, jnp.dtype(self.config.dtype)
        self.patch = initializers.replicated(values, self.config.width, dtype=dtype, rngs=rngs)

    def classify(self, images: Float[Array, "B H W 3"]) -> Float[Array, "B outputs"]:
        """Returns logits of the classes of each image, or the number predicted for it, in float32.

        Raises:
            ValueError: the images are not [B, H, W, 3], or the patch size does not divide them.
        """
        if images.ndim != 4 or images.shape[-1] != model_lib.CHANNELS:
            raise ValueError(
                f"images has shape {images.shape}; it must be [B, H, W, {model_lib.CHANNELS}]; add the batch axis to "
                f"one image with images[None]"
            )
        _, height, width, _ = images.shape
        side = self.patch_size
        if height % side or width % side:
            raise ValueError(
                f"images are {height} x {width} pixels, which model.patch_size {side} does not divide; use a "
                f"divisor of both"
            )
        x = self.patch(_patches(images, side)).astype(jnp.float32)
        return self.head(self.encode(x, None), None)


def _patches(images: Float[Array, "B H W channels"], side: int) -> Float[Array, "B T values"]:
    """Returns patches of `side` squared pixels; patches, and pixels in a patch, are in row order."""
    batch, height, width, channels = images.shape
    down, across = height // side, width // side
    # One axis at a time, because on a mesh with Explicit axes a reshape may split or merge only one.
    x = images.reshape(batch, down, side, width, channels).reshape(batch, down, side, across, side, channels)
    x = x.swapaxes(2, 3).reshape(batch, down * across, side, side, channels)
    return x.reshape(batch, down * across, side * side * channels)
