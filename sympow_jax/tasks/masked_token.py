"""Prediction of masked tokens."""

import numpy as np
from jaxtyping import Float

from sympow_jax import config as config_lib
from sympow_jax.config import task as task_lib
from sympow_jax.tasks import next_token


class MaskedToken(next_token.NextToken):
    """Cross-entropy of the tokens that a row hides from an encoder (Devlin et al. 2019), in nats."""

    def __init__(self, config: config_lib.Config):
        super().__init__(config)
        self.unembedded = task_lib.MASK_FRACTION

    def scores(
        self, mean: float, labels: np.ndarray, outputs: Float[np.ndarray, "n outputs"] | None
    ) -> dict[str, float]:
        """Returns `perplexity`, exp(loss)."""
        with np.errstate(over="ignore"):
            return {"perplexity": float(np.exp(mean))}
