"""Text generation: prompts are prefilled in one pass, then decoded token by token through a state.

States can be saved. They are pytrees of arrays whose first axis is the batch. Every function is pure.
"""

from sympow_jax.generation.batches import fork, insert, take
from sympow_jax.generation.decoding import Program
from sympow_jax.generation.drafts import verify
from sympow_jax.generation.loop import generate
from sympow_jax.generation.sampling import Sampling, sample
from sympow_jax.generation.state_file import restore_state, save_state
from sympow_jax.generation.text import Piece, complete, stream
from sympow_jax.generation.transcript import Transcript

__all__ = [
    "Piece",
    "Program",
    "Sampling",
    "Transcript",
    "complete",
    "fork",
    "generate",
    "insert",
    "restore_state",
    "sample",
    "save_state",
    "stream",
    "take",
    "verify",
]
