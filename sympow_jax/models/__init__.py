"""Models: decoders, encoders, image classifiers, and decoders whose attention is replaced."""

from sympow_jax.models.build import (
    Model,
    cast_weights,
    make,
    names_of_any_layer,
    parameter_name,
    parameter_names,
    parameter_specs,
    stack,
    unstack,
)
from sympow_jax.models.decoder import DecoderLM, DecoderState
from sympow_jax.models.encoder import DualEncoder, Encoder
from sympow_jax.models.image_classifier import ImageClassifier
from sympow_jax.models.matcher import AttentionMatcher
from sympow_jax.models.state_size import state_bytes
from sympow_jax.models.trunk import logits

__all__ = [
    "AttentionMatcher",
    "DecoderLM",
    "DecoderState",
    "DualEncoder",
    "Encoder",
    "ImageClassifier",
    "Model",
    "cast_weights",
    "logits",
    "make",
    "names_of_any_layer",
    "parameter_name",
    "parameter_names",
    "parameter_specs",
    "stack",
    "state_bytes",
    "unstack",
]
