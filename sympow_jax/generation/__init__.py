"""Text from trained decoders: prompts in one pass, then a token at a time through a state that can be kept.

States are pytrees of arrays whose first axis is the batch; every function is pure.
"""

from sympow_jax.generation.batches import fork, insert, take
from sympow_jax.generation.decoding import decode, fold, init_state, prefill
from sympow_jax.generation.loop import generate
from sympow_jax.generation.sampling import Sampling, sample
from sympow_jax.generation.state_file import restore_state, save_state
from sympow_jax.generation.transcript import Transcript

__all__ = [
    "Sampling",
    "Transcript",
    "decode",
    "fold",
    "fork",
    "generate",
    "init_state",
    "insert",
    "prefill",
    "restore_state",
    "sample",
    "save_state",
    "take",
]
