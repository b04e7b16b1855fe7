"""Metrics of classification and regression, as GLUE reports them (Wang et al. 2018), in float64."""

from typing import Any

import numpy as np
from jaxtyping import Float64, Int, Num, Real

__all__ = ["accuracy", "f1", "matthews", "pearson", "spearman"]


def accuracy(labels: Int[np.ndarray, " n"], predicted: Int[np.ndarray, " n"]) -> float:
    """The part of the predictions that are right.

    Raises:
      ValueError: as every function here, there is nothing to compare or as many labels as predictions are not there.
    """
    labels, predicted = _checked(labels, predicted)
    return float(np.mean(labels == predicted))


def matthews(labels: Int[np.ndarray, " n"], predicted: Int[np.ndarray, " n"]) -> float:
    """Matthews' correlation of two or more classes, in [-1, 1].

    (TP TN - FP FN) / sqrt((TP + FP) (TP + FN) (TN + FP) (TN + FN)) of two classes; of more, Gorodkin's R_K (2004),
    the correlation of the classes as one-hot vectors. 0 where labels or predictions are all of one class.
    """
    labels, predicted = _checked(labels, predicted)
    classes = np.union1d(labels, predicted)
    true = (labels[:, None] == classes).sum(0).astype(np.float64)
    guessed = (predicted[:, None] == classes).sum(0).astype(np.float64)
    count, right = float(len(labels)), float(np.sum(labels == predicted))
    spread = (count**2 - np.sum(true**2)) * (count**2 - np.sum(guessed**2))
    return float((right * count - np.sum(true * guessed)) / np.sqrt(spread)) if spread else 0.0


def f1(labels: Int[np.ndarray, " n"], predicted: Int[np.ndarray, " n"]) -> float:
    """2 TP / (2 TP + FP + FN) of class 1 against all others; 0 where neither labels nor predictions have it."""
    labels, predicted = _checked(labels, predicted)
    both = np.sum((labels == 1) & (predicted == 1))
    either = np.sum(labels == 1) + np.sum(predicted == 1)
    return float(2 * both / either) if either else 0.0


def pearson(labels: Real[np.ndarray, " n"], values: Real[np.ndarray, " n"]) -> float:
    """Pearson's correlation, in [-1, 1].

    0 where one side is constant: the quotient has no value there, and a constant tells nothing of the other side, as
    with `matthews`.

    Raises:
      ValueError: a number is not finite.
    """
    labels, values = _checked_numbers(labels, values)
    labels, values = _centered(labels), _centered(values)
    scale = np.sqrt(np.sum(labels**2)) * np.sqrt(np.sum(values**2))
    return float(np.clip(np.sum(labels * values) / scale, -1, 1)) if scale else 0.0


def spearman(labels: Real[np.ndarray, " n"], values: Real[np.ndarray, " n"]) -> float:
    """Spearman's correlation: Pearson's of the ranks, equal numbers having the mean of their ranks; 0 as there."""
    labels, values = _checked_numbers(labels, values)
    return pearson(_ranks(labels), _ranks(values))


def _centered(values: Float64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
    # The mean of equal numbers may differ from them by a rounding, which would correlate with anything.
    if np.all(values == values[0]):
        return np.zeros_like(values)
    # Divided by the largest magnitude before and after: sums and squares can neither overflow nor vanish.
    scaled = values / np.max(np.abs(values))
    centered = scaled - scaled.mean()
    return centered / np.max(np.abs(centered))


def _ranks(values: Float64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[group]


def _checked(
    labels: Num[np.ndarray, " n"], predicted: Num[np.ndarray, " n"]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    labels, predicted = np.asarray(labels), np.asarray(predicted)
    if labels.ndim != 1 or labels.shape != predicted.shape or not len(labels):
        raise ValueError(
            f"there are {labels.shape} labels and {predicted.shape} predictions; a metric needs as many of both, "
            f"one or more, in one dimension"
        )
    return labels, predicted


def _checked_numbers(
    labels: Real[np.ndarray, " n"], values: Real[np.ndarray, " n"]
) -> tuple[Float64[np.ndarray, " n"], Float64[np.ndarray, " n"]]:
    labels, values = (side.astype(np.float64) for side in _checked(labels, values))
    for name, side in (("labels", labels), ("predictions", values)):
        if not np.all(np.isfinite(side)):
            raise ValueError(f"{np.sum(~np.isfinite(side))} of {len(side)} {name} are not finite")
    return labels, values
