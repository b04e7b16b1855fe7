"""Rows with masked tokens for an encoder to predict, as BERT and RoBERTa are trained."""

import numpy as np
from jaxtyping import Int32

from sympow_jax import config as config_lib
from sympow_jax.config import task as task_lib
from sympow_jax.data import documents, rows

# Fractions of the tokens to predict that are replaced by the mask and by a random token. The rest are unchanged
# (Devlin et al. 2019, section 3.1).
_SHOWN_MASKED, _SHOWN_RANDOM = 0.8, 0.1


def mask(
    tokens: Int32[np.ndarray, " tokens"],
    rng: np.random.Generator,
    *,
    fraction: float,
    mask_token: int,
    vocab_size: int,
) -> tuple[Int32[np.ndarray, " tokens"], Int32[np.ndarray, " tokens"]]:
    """Returns the inputs and the targets of masked prediction; targets are -1 where nothing is predicted.

    A `fraction` of the tokens is drawn without replacement to be predicted. Their number is rounded at random and is at
    least one. A random replacement is uniform over the vocabulary except the mask.
    """
    count = max(1, int(fraction * len(tokens) + rng.random()))
    chosen = rng.permutation(len(tokens))[:count]
    targets = np.full(len(tokens), rows.NO_TARGET, np.int32)
    targets[chosen] = tokens[chosen]
    kind, other = rng.random(count), rng.integers(vocab_size - 1, size=count)
    other += other >= mask_token
    replacement = np.where(kind < _SHOWN_MASKED + _SHOWN_RANDOM, other, tokens[chosen])
    replacement = np.where(kind < _SHOWN_MASKED, mask_token, replacement)
    shown = tokens.copy()
    shown[chosen] = replacement
    return shown, targets


class MaskedRows(rows.Rows):
    """Rows of `data.context_length` tokens from the concatenated documents, some tokens masked.

    With packing `windows`, every row is full: tokens after the last whole row are dropped. With packing `documents`,
    every token is in one row, `segment_ids` are as in `rows.Rows`, and padding is never predicted.

    Raises:
        ValueError: there is less than one row, or the mask is outside the vocabulary. On access, as `rows.Rows`.
    """

    def __init__(
        self,
        source: documents.Documents,
        config: config_lib.DataConfig,
        task: config_lib.TaskConfig,
        *,
        vocab_size: int,
    ):
        self._mask_token = vocab_size - 1 if task.mask_token is None else task.mask_token
        if not 0 <= self._mask_token < vocab_size or vocab_size < 2:
            raise ValueError(
                f"task.mask_token is {self._mask_token}, but model.vocab_size is {vocab_size}; it must be an id of at "
                f"least two in the vocabulary"
            )
        super().__init__(source, config, vocab_size=vocab_size)
        self.whole, rest = divmod(self._total, self._length)
        self._count = self.whole + (self._segmented and rest > 0)
        if not self._count:
            raise ValueError(
                f"the documents have {self._total} tokens, less than one row of data.context_length {self._length}; "
                f"name more data, shorten it, or set data.packing=documents"
            )

    def row(self, index: int, key: tuple[int, ...] = ()) -> rows.Row:
        """Returns row `index`; the masked tokens are a function of `key` only."""
        tokens, document = self._read(index, self._length)
        shown, targets = mask(
            tokens,
            np.random.default_rng(key),
            fraction=task_lib.MASK_FRACTION,
            mask_token=self._mask_token,
            vocab_size=self._vocab_size,
        )
        return {
            **self._inputs(shown, document),
            "targets": rows.filled(targets, self._length, rows.NO_TARGET),
        }
