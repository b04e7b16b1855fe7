"""Construction of models from settings, and names and shardings of their parameters."""

import re
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sympow_jax import config as config_lib
from sympow_jax.layers import partitioning
from sympow_jax.models import decoder, encoder, image_classifier, matcher

Model = decoder.DecoderLM | encoder.Encoder | image_classifier.ImageClassifier | matcher.AttentionMatcher
"""Type of the models that `make` returns."""


def make(
    config: config_lib.ModelConfig, task: config_lib.TaskConfig, *, rngs: nnx.Rngs | int, **form: bool
) -> Model:
    """Returns a new model for a task; `form` has the arguments `stacked` and `scans` of `Trunk`.

    It is an image classifier if it has a patch size, a decoder to predict the next token, a matcher to match the
    outputs of attention, and an encoder otherwise: a dual encoder for two texts that are encoded independently.
    """
    if config.patch_size is not None:
        return image_classifier.ImageClassifier(config, task, rngs=rngs, **form)
    if task.is_causal:
        kind = matcher.AttentionMatcher if task.replaces_attention else decoder.DecoderLM
        return kind(config, rngs=rngs, **form)
    encoder_type = encoder.DualEncoder if task.dual_encoder else encoder.Encoder
    return encoder_type(config, task, rngs=rngs, **form)


def cast_weights[M: nnx.Module](model: M, dtype: str) -> M:
    """Returns the model with its matrices, and their biases, in `dtype`.

    Each product converts them to its own dtype. Norms, decays, gates and rotation rates, which take little memory,
    stay in float32.
    """
    graph, variables = nnx.split(model)

    def cast(variable: nnx.Variable) -> nnx.Variable:
        names = variable.get_metadata().get("out_sharding") or ()
        is_exact = not names or "gates" in names
        return variable if is_exact else variable.replace(variable[...].astype(dtype))

    return nnx.merge(graph, jax.tree.map(cast, variables, is_leaf=lambda x: isinstance(x, nnx.Variable)))


def parameter_name(path: tuple[Any, ...]) -> str:
    """Returns the name of a parameter, such as `blocks.0.mlp.up.kernel`, from its path in a tree of dicts."""
    return ".".join(str(key.key) for key in path)


def parameter_names(params: dict[str, Any]) -> dict[str, Any]:
    """Returns the name of each parameter of a stacked model as an array: of one for each period, or of no axis."""
    period = len(params.get("stacked_blocks", ()))

    def names(path: tuple[Any, ...], leaf: Any) -> np.ndarray:
        first, *rest = (key.key for key in path)
        if first != "stacked_blocks":
            return np.array(parameter_name(path))
        place, *rest = rest
        layers = range(place, place + period * leaf.shape[0], period)
        return np.array([".".join(map(str, ("blocks", layer, *rest))) for layer in layers])

    return jax.tree_util.tree_map_with_path(names, params)


def names_of_any_layer(names: Iterable[str]) -> list[str]:
    """Returns the names in order, with `*` for the layer, each once."""
    return sorted({re.sub(r"^blocks\.\d+\.", "blocks.*.", name) for name in names})


def stack(params: dict[str, Any], period: int) -> dict[str, Any]:
    """Returns parameters by layer in the form of a stacked model.

    Args:
        params: nested dict of a model whose `blocks` are a dict by layer.
        period: `config.attention_period` of the model.
    """
    others = dict(params)
    blocks = others.pop("blocks", None)
    if blocks is None:  # the running statistics of a model without any
        return others
    stacked = {
        place: jax.tree.map(lambda *x: jnp.stack(x), *(blocks[i] for i in range(place, len(blocks), period)))
        for place in range(period)
    }
    return others | {"stacked_blocks": stacked}


def unstack(params: dict[str, Any], *, donate: bool = False) -> dict[str, Any]:
    """Returns the inverse of `stack`; with `donate`, deletes each stacked array when its layers are copied."""
    others = dict(params)
    stacked = others.pop("stacked_blocks", None)
    if stacked is None:
        return others
    leaves, structure = jax.tree.flatten(stacked)
    layers = []
    for leaf in leaves:
        layers.append([leaf[index] for index in range(len(leaf))])
        if donate:
            leaf.delete()
    periods = [jax.tree.unflatten(structure, parts) for parts in zip(*layers)]
    blocks = {
        index * len(stacked) + place: block
        for index, period in enumerate(periods)
        for place, block in period.items()
    }
    return others | {"blocks": blocks}


def parameter_specs(model: Model) -> dict[tuple[Any, ...], jax.sharding.PartitionSpec]:
    """Returns the partition spec of each parameter by path, derived from its logical axis names."""
    with nnx.logical_axis_rules(partitioning.RULES):
        specs = nnx.get_partition_spec(nnx.state(model, nnx.Param))
    return {path: spec.get_value() for path, spec in nnx.to_flat_state(specs)}
