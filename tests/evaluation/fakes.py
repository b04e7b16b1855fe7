"""Models whose loss at every position is known, or depends visibly on the whole context."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sympow_jax import config, models

VOCABULARY = 11


class CountingModel(nnx.Module):
    """Model that predicts x + 1 after token x, with a logit of position / 100: its confidence grows with position."""

    def __init__(self):
        self.config = config.ModelConfig(vocab_size=VOCABULARY, layers=1, width=8, heads=2)
        self.scale = nnx.Param(jnp.float32(0.01))

    def init_state(self, batch, *, max_length):
        return {"position": jnp.zeros((batch,), jnp.int32)}

    def hidden(self, tokens, *, segment_ids=None, initial_state=None, **_):
        state = self.init_state(len(tokens), max_length=0) if initial_state is None else initial_state
        return self.extend_hidden(tokens, state)[0]

    def extend_hidden(self, tokens, state, **_):
        time = state["position"][:, None] + jnp.arange(1, tokens.shape[1] + 1)
        guess = jax.nn.one_hot((tokens + 1) % VOCABULARY, VOCABULARY)
        hidden = guess * (self.scale[...] * time)[..., None]
        return hidden, {"position": time[:, -1]}

    def unembed(self, hidden):
        return hidden


def counting_documents(count, length):
    """Returns documents in which the token after x is x + 1, each with another first token."""
    return (np.arange(length) + np.arange(count)[:, None]) % VOCABULARY


def expected_loss(position):
    logit = np.asarray(position) / 100
    return np.log(np.exp(logit) + VOCABULARY - 1) - logit


def decoder(vocab_size, preset="softmax", **options):
    """Returns a decoder whose outputs depend visibly on the whole context."""
    attention = config.preset(preset, **options)
    settings = config.ModelConfig(
        vocab_size=vocab_size, layers=1, width=16, heads=2, dtype="float32", attention=attention
    )
    model = models.DecoderLM(settings, rngs=nnx.Rngs(0))
    nnx.update(model, jax.tree.map(lambda x: 5 * x, nnx.state(model)))
    return model
