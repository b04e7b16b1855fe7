"""Rows of which an encoder predicts masked tokens, as BERT and RoBERTa are trained."""

import numpy as np
from jaxtyping import Int32

from sympow_jax import config as config_lib
from sympow_jax.data import documents, rows

__all__ = ["MaskedRows", "mask"]

# Of the tokens to predict: shown as the mask, shown as a random token; the rest are shown as they are
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
    """What is shown of `tokens` and what is predicted, -1 where nothing is.

    `fraction` of the tokens, its rounding random, at least one, are drawn without replacement to be predicted. A
    random token is uniform over the vocabulary without the mask.
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


class MaskedRows:
    """The documents laid end to end and cut every `data.context_length` tokens, some of them masked.

    With packing `windows` a row is always full: tokens after the last whole row are left out. With packing
    `documents` every token is in one row, `segment_ids` are those of `rows.Rows`, and padding is never predicted.

    Raises:
      ValueError: there is less than one row, or the mask is outside the vocabulary; on reading, as `rows.Rows`.
    """

    def __init__(
        self,
        source: documents.Documents,
        config: config_lib.DataConfig,
        task: config_lib.TaskConfig,
        *,
        vocab_size: int,
    ):
        self._fraction, self._vocab_size = task.mask_fraction, vocab_size
        self._mask_token = vocab_size - 1 if task.mask_token is None else task.mask_token
        if not 0 <= self._mask_token < vocab_size or vocab_size < 2:
            raise ValueError(
                f"task.mask_token is {self._mask_token}, but model.vocab_size is {vocab_size}; it must be an id of at "
                f"least two in the vocabulary"
            )
        self._rows = rows.Rows(source, config, vocab_size=vocab_size)
        full, rest = divmod(self._rows.tokens, config.context_length)
        self._count = full + (config.packing == "documents" and rest > 0)
        if not self._count:
            raise ValueError(
                f"the documents have {self._rows.tokens} tokens, less than one row of data.context_length "
                f"{config.context_length}; name more data, shorten it, or set data.packing=documents"
            )

    def __len__(self) -> int:
        return self._count

    @property
    def together(self) -> int:
        """Consecutive rows that storage keeps together."""
        return self._rows.together

    def row(self, index: int, key: tuple[int, ...]) -> rows.Row:
        """Row `index`; which of its tokens are masked is a function of `key` alone."""
        row = self._rows.own(index)
        tokens = row["inputs"]
        real = int((row["segment_ids"] != rows.PADDING).sum()) if "segment_ids" in row else len(tokens)
        shown, targets = mask(
            tokens[:real],
            np.random.default_rng(key),
            fraction=self._fraction,
            mask_token=self._mask_token,
            vocab_size=self._vocab_size,
        )
        padded = np.full(len(tokens), rows.NO_TARGET, np.int32)
        padded[:real] = targets
        return {**row, "inputs": np.concatenate([shown, tokens[real:]]), "targets": padded}
