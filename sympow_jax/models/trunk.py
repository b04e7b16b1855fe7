"""Common parts of all models: embedding, pre-norm blocks of attention and MLP, and final norm."""

import abc
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sympow_jax import config as config_lib
from sympow_jax import layers
from sympow_jax.array_types import Array, Float, Int
from sympow_jax.layers import initializers, parallel, partitioning
from sympow_jax.ops import arguments, documents, rotary
from sympow_jax.ops.promotion import by_default_rules

# Primitives whose results cost little to compute again: XLA fuses them with what needs them.
_ELEMENTWISE = frozenset(
    """
    abs add add_any and broadcast_in_dim ceil clamp concatenate convert_element_type copy cos div eq erf erfc exp exp2
    expm1 floor ge gt integer_pow iota is_finite le log log1p log2 logistic lt max min mul ne neg not one_minus_square
    or pad pow reduce_precision rem reshape rev round rsqrt select_n sign sin slice split sqrt square squeeze sub tan
    tanh tile transpose unstack xor
    """.split()  # noqa: SIM905
)


# Values that are saved for the backward pass of a block in addition to its input, by `config.remat`.
_SAVED = {
    "elementwise": lambda primitive, *_, **__: primitive.name not in _ELEMENTWISE,
    "attention": jax.checkpoint_policies.save_only_these_names("power_attention_out"),
    "full": jax.checkpoint_policies.nothing_saveable,
}
# The axis of layers in the variables of stacked blocks has no logical name: it is not sharded.
_LAYER_AXIS = {nnx.PARTITION_NAME: None}


class Block(nnx.Module):
    """Pre-norm block: x + attention(norm(x)), then x + mlp(norm(x)), with x in float32."""

    def __init__(self, config: config_lib.ModelConfig, layer: int, *, rngs: nnx.Rngs):
        dtype = jnp.dtype(config.dtype)
        self.attention_norm = layers.make_norm(config, dtype, rngs=rngs)
        self.attention = layers.make_attention(config, layer, rngs=rngs)
        self.mlp_norm = layers.make_norm(config, dtype, rngs=rngs)
        self.mlp = layers.make_mlp(config, rngs=rngs)

    @by_default_rules
    def __call__(
        self, x: Float[Array, "B T M"], *, segment_ids: Int[Array, "B T"] | None
    ) -> Float[Array, "B T M"]:
        """Returns the new residual stream."""
        normed = layers.normalize(self.attention_norm, x, segment_ids)
        return self._fed_forward(x + self.attention(normed, segment_ids=segment_ids), segment_ids)

    @by_default_rules
    def extend(
        self, x: Float[Array, "B T M"], state: layers.AttentionState, *, segment_ids: Int[Array, "B T"] | None
    ) -> tuple[Float[Array, "B T M"], layers.AttentionState]:
        """Returns the new residual stream after the tokens of a state, and the state after x."""
        normed = layers.normalize(self.attention_norm, x, segment_ids)
        mixed, state = self.attention.extend(normed, state, segment_ids=segment_ids)
        return self._fed_forward(x + mixed, segment_ids), state

    def _fed_forward(self, x, segment_ids):
        return x + self.mlp(layers.normalize(self.mlp_norm, x, segment_ids))


class Trunk(nnx.Module, abc.ABC):
    """Embedding, blocks and final norm, the base class of all models.

    A subclass adds inputs and outputs.

    Args:
        config: the shape of the model.
        rngs: source of initial values, or a seed.
        stacked: whether the model has `stacked_blocks` instead of `blocks`, as in training. It has the same initial
            values, but neither takes nor returns states.
        scans: whether stacked layers are a loop over periods of `config.attention_period` layers, which is compiled
            once, instead of one after another.

    Attributes:
        blocks: blocks in order.
        stacked_blocks: blocks of one period, whose variables have the periods as their first axis.
    """

    blocks: nnx.List[Block]
    stacked_blocks: nnx.List[Block]

    block_type: ClassVar[type[Block]] = Block
    """Class of the blocks."""

    def __init__(
        self,
        config: config_lib.ModelConfig,
        *,
        rngs: nnx.Rngs | int,
        stacked: bool = False,
        scans: bool = True,
    ):
        rngs = initializers.as_rngs(rngs)
        self.config, self.scans = config, stacked and scans
        self._init_embedding(rngs)
        if config.embedding_norm:
            self.embedding_norm = layers.make_norm(config, jnp.float32, rngs=rngs)
        if config.longest_document is not None:
            self.position_embedding = initializers.table(
                config.longest_document, config.width, names=("position", "embed"), rngs=rngs
            )
        if stacked:
            period = config.attention_period

            @nnx.scan(
                in_axes=nnx.Carry,
                out_axes=(nnx.Carry, 0),
                length=config.layers // period,
                transform_metadata=_LAYER_AXIS,
            )
            def make(rngs: nnx.Rngs) -> tuple[nnx.Rngs, nnx.List[Block]]:
                return rngs, nnx.List([self.block_type(config, layer, rngs=rngs) for layer in range(period)])

            self.stacked_blocks = make(rngs)[1]
        else:
            self.blocks = nnx.List(
                [self.block_type(config, layer, rngs=rngs) for layer in range(config.layers)]
            )
        self.final_norm = layers.make_norm(config, jnp.dtype(config.dtype), rngs=rngs)

    @abc.abstractmethod
    def _init_embedding(self, rngs: nnx.Rngs) -> None:
        """Creates the parameters of the embedding, before all others."""

    def encode(
        self, x: Float[Array, "B T M"], segment_ids: Int[Array, "B T"] | None
    ) -> Float[Array, "B T M"]:
        """Returns the final normalized hidden states of embedded tokens or patches, without a state.

        `config.remat` selects the values that the backward pass recomputes.
        """
        segment_ids = arguments.to_segment_ids(segment_ids, x.shape[:2])
        x, _ = self._stem(x, segment_ids)
        x = self._over_blocks(lambda block, x: block(x, segment_ids=segment_ids), shard_tokens(x))
        return layers.normalize(self.final_norm, x, segment_ids)

    def _over_blocks[Carry](self, step: Callable[[Block, Carry], Carry], carry: Carry) -> Carry:
        """Returns `carry` after `step(block, carry)` for each block in order.

        Args:
            step: function of a block and of arrays whose first axes are rows and times.
            carry: these arrays before the first block.
        """
        remat = self.config.remat
        if self.scans and remat == "none":
            # XLA itself computes elementwise values again instead of keeping them, but not those of another loop.
            remat = "elementwise"

        def apply(blocks: nnx.List[Block], carry: Carry) -> Carry:
            for block in blocks:
                carry = _rematerialized(step, block, carry, remat, in_loop=self.scans)
                carry = jax.tree.map(shard_tokens, carry)
            return carry

        if not hasattr(self, "stacked_blocks"):
            return apply(self.blocks, carry)
        if self.scans:
            scan = nnx.scan(apply, in_axes=(0, nnx.Carry), out_axes=nnx.Carry, transform_metadata=_LAYER_AXIS)
            return scan(self.stacked_blocks, carry)
        graph, variables = nnx.split(self.stacked_blocks)
        leaves, structure = jax.tree.flatten(variables)
        statistics = []
        # The gradient of `unstack` is one copy, that of slices would be a sum over layers of whole arrays.
        for period in zip(*map(jnp.unstack, leaves), strict=True):
            blocks = nnx.merge(graph, jax.tree.unflatten(structure, period))
            carry = apply(blocks, carry)
            statistics.append(nnx.state(blocks, nnx.BatchStat))
        nnx.update(self.stacked_blocks, jax.tree.map(lambda *means: jnp.stack(means), *statistics))
        return carry

    def _stem(
        self,
        x: Float[Array, "B T M"],
        segment_ids: Int[Array, "B T"] | None,
        state: documents.PositionState | None = None,
    ) -> tuple[Float[Array, "B T M"], documents.PositionState | None]:
        """Returns the input of the first block and the new position, from embedded tokens or patches.

        Depending on the config, applies `embedding_norm` and adds positions. Outputs beyond learned absolute positions
        are NaN.

        Raises:
            ValueError: a document of this call has more tokens than there are learned absolute positions. Tokens before
                the state do not count, and traced segment ids are not checked.
        """
        if self.config.embedding_norm:
            x = layers.normalize(self.embedding_norm, x, segment_ids)
        if self.config.added_position is None:
            return x, None
        longest = self.config.longest_document
        if longest is not None:
            _check_documents(x.shape[1], segment_ids, longest)
        state = state or documents.PositionState.zeros(len(x))
        if segment_ids is None:
            segment_ids = jnp.broadcast_to(documents.continued(state.segment)[:, None], x.shape[:2])
        places, state = documents.positions(partitioning.gather_time(segment_ids), state)
        # Positions are added after the norm, so that they have the same scale as tokens.
        if longest is None:
            return x + rotary.sinusoidal(places, x.shape[-1]), state
        rows = parallel.lookup(self.position_embedding[...], jnp.clip(places - 1, 0, longest - 1))
        return x + jnp.where((places > longest)[..., None], jnp.nan, rows), state


class TokenTrunk(Trunk):
    """A trunk with tokens as inputs and outputs."""

    def _init_embedding(self, rngs):
        size = self.config.vocab_size, self.config.width
        table = functools.partial(initializers.table, *size, names=("vocab", "embed"), rngs=rngs)
        self.embedding = table()
        if not self.config.tied_head:
            self.unembedding = table()

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T M"]:
        """Returns the rows of the embedding, in float32 if its dtype is shorter.

        Raises:
            ValueError: tokens are not integers of shape [B, T], or those of a NumPy array are not in the vocabulary.
        """
        # Not those on a device, for which the host would have to wait.
        if isinstance(tokens, np.ndarray) and tokens.dtype.kind in "iu" and tokens.size:
            lowest, highest = tokens.min(), tokens.max()
            if lowest < 0 or highest >= self.config.vocab_size:
                raise ValueError(
                    f"tokens are from {lowest} to {highest}; they must be in the vocabulary of {self.config.vocab_size}"
                )
        tokens = arguments.to_array("tokens", tokens)
        if tokens.ndim != 2:
            raise ValueError(
                f"tokens has shape {tokens.shape}; it must be [B, T]; add the batch axis to one row with tokens[None]"
            )
        if not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(
                f"tokens has dtype {tokens.dtype}; it must be an integer dtype; pass token ids, not embeddings"
            )
        rows = parallel.lookup(self.embedding[...], tokens)
        return rows.astype(np.promote_types(rows.dtype, jnp.float32))

    def unembed(self, hidden: Float[Array, "B T M"]) -> Float[Array, "B T V"]:
        """Returns logits in float32: hidden states times the transpose of `output_table`."""
        return logits(hidden, self.output_table, jnp.dtype(self.config.dtype))

    @property
    def output_table(self) -> Float[Array, "V M"]:
        """Rows whose products with a hidden state are the logits: the embedding, or `unembedding` if it is not tied."""
        return (self.embedding if self.config.tied_head else self.unembedding)[...]


def _check_documents(time: int, segment_ids: Int[Array, "B T"] | None, longest: int) -> None:
    """Raises ValueError for a document of more than `longest` tokens, unless segment ids are traced."""
    if time <= longest or isinstance(segment_ids, jax.core.Tracer):
        return
    lengths = [time]
    if segment_ids is not None:
        rows = (row[row >= 0] for row in np.asarray(segment_ids))
        starts = ((np.flatnonzero(np.diff(row, prepend=-1)), len(row)) for row in rows)
        lengths = [length for begins, end in starts for length in np.diff(begins, append=end)]
    if max(lengths, default=0) > longest:
        raise ValueError(
            f"a document has {max(lengths)} tokens, but learned positions end at "
            f"model.attention.max_document_length, {longest}; use shorter documents or another position"
        )


def shard_tokens(x: Float[Array, "B T ..."]) -> Float[Array, "B T ..."]:
    """Shards values per token over the mesh in scope."""
    return partitioning.constrain(x, partitioning.TOKENS)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def logits(hidden: Float[Array, "B T M"], table: Float[Array, "V M"], dtype: Any) -> Float[Array, "B T V"]:
    """Returns hidden . table^T, a product in `dtype` with float32 accumulation and result.

    The two products of its backward pass are in `dtype` too: the gradient of the logits is rounded to `dtype` first.
    """
    return _product(hidden, table, dtype, jnp.float32)


@logits.defjvp
def _logits_jvp(dtype, primals, tangents):
    (hidden, table), (hidden_tangent, table_tangent) = primals, tangents
    # Results of `dtype`: float32 ones would make the backward pass multiply in float32, at half of the speed on a GPU.
    tangent = _product(hidden_tangent, table, dtype, dtype) + _product(hidden, table_tangent, dtype, dtype)
    return logits(hidden, table, dtype), tangent.astype(jnp.float32)


def _product(hidden, table, dtype, result_dtype):
    if partitioning.is_explicit(hidden, table):
        return parallel.explicit_product(hidden, table.T, dtype=dtype, preferred_element_type=result_dtype)
    return jnp.einsum(
        "btm,vm->btv", hidden.astype(dtype), table.astype(dtype), preferred_element_type=result_dtype
    )


def _rematerialized[Carry](
    step: Callable[[Block, Carry], Carry], block: Block, carry: Carry, remat: str, *, in_loop: bool
) -> Carry:
    """Returns `step(block, carry)`, whose backward pass computes again what `remat` does not save."""
    if remat == "none":
        return step(block, carry)
    graph, *variables = nnx.split(block, nnx.Param, nnx.BatchStat)

    # Within a loop, XLA cannot merge what is computed again with what was computed first, and needs no barrier.
    @functools.partial(jax.checkpoint, policy=_SAVED[remat], prevent_cse=not in_loop)
    def call(carry: Carry, *variables: nnx.State) -> tuple[Carry, nnx.State]:
        layer = nnx.merge(graph, *variables)
        return step(layer, carry), nnx.state(layer, nnx.BatchStat)

    carry, statistics = call(carry, *variables)
    nnx.update(block, statistics)
    return carry
