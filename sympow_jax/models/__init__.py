"""Assemblies of layers."""

from sympow_jax.models.decoder import DecoderLM, DecoderState, logits, parameter_specs
from sympow_jax.models.state_size import state_bytes

__all__ = ["DecoderLM", "DecoderState", "logits", "parameter_specs", "state_bytes"]
