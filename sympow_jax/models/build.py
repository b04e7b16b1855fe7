"""The model of a run's settings."""

from typing import Any

import jax
from flax import nnx

from sympow_jax import config as configs
from sympow_jax.layers import partitioning
from sympow_jax.models import decoder, encoder, image_classifier

__all__ = ["Model", "make", "parameter_name", "parameter_specs"]

Model = decoder.DecoderLM | encoder.Encoder | image_classifier.ImageClassifier
"""What `make` makes."""


def make(config: configs.ModelConfig, task: configs.TaskConfig, *, rngs: nnx.Rngs | int) -> Model:
    """A new model: of images if it has a patch size, else a decoder for the next token and an encoder for others."""
    if config.patch_size is not None:
        return image_classifier.ImageClassifier(config, task, rngs=rngs)
    if task.name == "next_token":
        return decoder.DecoderLM(config, rngs=rngs)
    return encoder.Encoder(config, task, rngs=rngs)


def parameter_name(path: tuple[Any, ...]) -> str:
    """The name of a parameter, such as `blocks.0.mlp.up.kernel`, from its path in a tree of dicts."""
    return ".".join(str(key.key) for key in path)


def parameter_specs(model: Model) -> dict[tuple[Any, ...], jax.sharding.PartitionSpec]:
    """Returns how a model's parameters are sharded over the mesh of a run, by path: by their logical axis names."""
    with nnx.logical_axis_rules(partitioning.RULES):
        specs = nnx.get_partition_spec(nnx.state(model, nnx.Param))
    return {path: spec.get_value() for path, spec in nnx.to_flat_state(specs)}
