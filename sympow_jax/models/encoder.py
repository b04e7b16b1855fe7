"""Bidirectional encoders of tokens, for masked tokens, classification and regression."""

from typing import ClassVar

from flax import nnx

from sympow_jax import config as config_lib
from sympow_jax.array_types import Array, Float, Int
from sympow_jax.layers import initializers
from sympow_jax.models import head, trunk


class Encoder(trunk.TokenTrunk):
    """Pre-norm encoder with the architecture of `DecoderLM`, except that attention is bidirectional.

    RoBERTa (Liu et al. 2019) differs in four ways: its norms follow each half of a block, its projections have biases,
    a dense layer with a norm precedes the unembedding, and classes are read from the first token. Matrix products are
    in `config.dtype`. Parameters, the residual stream, logits and the head are float32.
    """

    head_type: ClassVar[type[head.Head | head.PairHead]] = head.Head
    """Class of the head."""

    def __init__(
        self,
        config: config_lib.ModelConfig,
        task: config_lib.TaskConfig,
        *,
        rngs: nnx.Rngs | int,
        **form: bool,
    ):
        rngs = initializers.as_rngs(rngs)
        super().__init__(config, rngs=rngs, **form)
        if task.outputs is not None:
            self.head = self.head_type(config, task.outputs, rngs=rngs)

    def hidden(
        self, tokens: Int[Array, "B T"], *, segment_ids: Int[Array, "B T"] | None = None
    ) -> Float[Array, "B T M"]:
        """Returns the final normalized hidden states.

        A document starts wherever the segment id changes. A negative id is padding: no token attends to it, and its
        hidden states are meaningless.
        """
        return self.encode(self.embed(tokens), segment_ids)

    def classify(
        self, tokens: Int[Array, "B T"], *, segment_ids: Int[Array, "B T"] | None = None
    ) -> Float[Array, "B outputs"]:
        """Returns logits of the classes of each row, or the number predicted for it, in float32.

        Raises:
            ValueError: the model has no head.
        """
        if not hasattr(self, "head"):
            raise ValueError("the model has no head; make it for a task that has labels")
        return self.head(self.hidden(tokens, segment_ids=segment_ids), segment_ids)


class DualEncoder(Encoder):
    """Encoder of rows of two texts, which are encoded independently by the same weights (Tay et al. 2020).

    A row is the first text, with segment id 0, then the second, with segment id 1, then padding, with a negative one.
    The texts are two documents to the encoder: tokens attend within their text, and positions restart. The means over
    both texts are classified by `head.PairHead`. All other parameters are those of an `Encoder`.
    """

    head_type = head.PairHead
