"""Text generation: prompts are prefilled in one pass, then decoded token by token through a state.

States can be saved. They are pytrees of arrays whose first axis is the batch. Every function is pure.
"""

from sympow_jax.generation.batches import fork, insert, take
from sympow_jax.generation.decoding import decode, fold, init_state, prefill
from sympow_jax.generation.loop import generate
from sympow_jax.generation.sampling import Sampling, sample
from sympow_jax.generation.state_file import restore_state, save_state
from sympow_jax.generation.text import Codec, Piece, complete, stream
from sympow_jax.generation.transcript import Transcript

__all__ = [
    "Codec",
    "Piece",
    "Sampling",
    "Transcript",
    "complete",
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
    "stream",
    "take",
]
