"""Attention maps, half-lives of decays and rotation rates of a model's layers for one text."""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import numpy as np
from flax import nnx
from jaxtyping import Float, Int

from sympow_jax import layers, models
from sympow_jax.array_types import Array


@dataclasses.dataclass(frozen=True)
class LayerMaps:
    """Attention maps, half-lives and rotation rates of one layer.

    Attributes:
        layer: index of the layer, from 0.
        weights: weight of the value of each token (last axis) in the output of each token (second last), as in
            `layers.AttentionMaps`.
        half_life: number of tokens until a head, or a value channel, has forgotten half, if every token decayed as
            this one does: ln 2 / -log_decay, or infinity without forgetting. None without a decay.
        rate: distance that each token moves the learned position of a head, or of each of its pairs; None unless
            learned.
        theta: angle in radians that each pair rotates by at rate 1, the fastest first; None without learned rates.
    """

    layer: int
    weights: Float[np.ndarray, "N T T"]
    half_life: Float[np.ndarray, "K T ..."] | None
    rate: Float[np.ndarray, "K T ..."] | None
    theta: Float[np.ndarray, " pairs"] | None


def attention_maps(
    model: models.DecoderLM | models.Encoder, tokens: Sequence[int], indices: Sequence[int]
) -> list[LayerMaps]:
    """Returns the maps of the layers `indices`, counted from 0, for one row of tokens.

    Takes T x T elements per head.
    """
    # By default, GPUs round the factors of float32 products.
    with jax.default_matmul_precision("highest"):
        inputs = _attention_inputs(*nnx.split(model), np.array([tokens], np.int32))
        found = []
        for index in indices:
            attention = model.blocks[index].attention
            maps = _maps(*nnx.split(attention), inputs[index])
            half_life = None
            if maps.log_decay is not None:
                with np.errstate(divide="ignore"):
                    half_life = math.log(2) / np.abs(_heads_first(maps.log_decay))
            rate = None if maps.rate is None else _heads_first(maps.rate)
            weights = np.asarray(maps.weights[0])
            found.append(LayerMaps(index, weights, half_life, rate, attention.positions.theta))
        return found


@functools.partial(jax.jit, static_argnames="graph")
def _attention_inputs(
    graph: nnx.GraphDef, variables: nnx.State, tokens: Int[Array, "1 T"]
) -> list[Float[Array, "1 T M"]]:
    """Returns the input of each layer's attention."""
    model = nnx.merge(graph, variables)
    # Rematerialization runs copies of the blocks, whose recorded inputs would be lost.
    model.config = dataclasses.replace(model.config, remat="none")
    for block in model.blocks:
        block.attention = _Recorder(block.attention)
    model.hidden(tokens)
    return [block.attention.recorded for block in model.blocks]


@functools.partial(jax.jit, static_argnames="graph")
def _maps(graph: nnx.GraphDef, variables: nnx.State, x: Float[Array, "1 T M"]) -> layers.AttentionMaps:
    return nnx.merge(graph, variables).maps(x)


class _Recorder(nnx.Module):
    """An attention layer that records its input."""

    def __init__(self, layer: layers.Attention):
        self.layer = layer
        self.recorded: Array | None = nnx.data(None)

    def __call__(self, x: Float[Array, "B T M"], **options) -> Float[Array, "B T M"]:
        self.recorded = x
        return self.layer(x, **options)


def _heads_first(x: Float[Array, "1 T K ..."]) -> Float[np.ndarray, "K T ..."]:
    return np.swapaxes(np.asarray(x[0]), 0, 1)
