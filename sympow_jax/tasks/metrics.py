"""Metrics of classification and regression as in GLUE (Wang et al. 2018), in float64."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Int, Num, Real


def accuracy(labels: Int[np.ndarray, " n"], predicted: Int[np.ndarray, " n"]) -> float:
    """Returns the fraction of predictions that are right.

    Raises:
        ValueError: as in every function here, there are no labels, or labels and predictions differ in number.
    """
    labels, predicted = _checked(labels, predicted)
    return float(np.mean(labels == predicted))


def matthews(labels: Int[np.ndarray, " n"], predicted: Int[np.ndarray, " n"]) -> float:
    """Returns Matthews' correlation of two or more classes, in [-1, 1].

    For two classes, it is (TP TN - FP FN) / sqrt((TP + FP) (TP + FN) (TN + FP) (TN + FN)). For more, it is Gorodkin's
    R_K (2004), the correlation of the classes as one-hot vectors. It is 0 if all labels or all predictions are of one
    class.
    """
    labels, predicted = _checked(labels, predicted)
    classes = np.union1d(labels, predicted)
    true = (labels[:, None] == classes).sum(0).astype(np.float64)
    guessed = (predicted[:, None] == classes).sum(0).astype(np.float64)
    count, right = float(len(labels)), float(np.sum(labels == predicted))
    spread = (count**2 - np.sum(true**2)) * (count**2 - np.sum(guessed**2))
    return float((right * count - np.sum(true * guessed)) / np.sqrt(spread)) if spread else 0.0


def f1(labels: Int[np.ndarray, " n"], predicted: Int[np.ndarray, " n"]) -> float:
    """Returns the F1 score, 2 TP / (2 TP + FP + FN), of class 1 against the others.

    It is 0 if class 1 does not occur in labels or predictions.
    """
    labels, predicted = _checked(labels, predicted)
    both = np.sum((labels == 1) & (predicted == 1))
    either = np.sum(labels == 1) + np.sum(predicted == 1)
    return float(2 * both / either) if either else 0.0


def pearson(labels: Real[np.ndarray, " n"], values: Real[np.ndarray, " n"]) -> float:
    """Returns Pearson's correlation, in [-1, 1]; NaN if a number is not finite.

    It is 0 if labels or predictions are constant, where the quotient is undefined, as in `matthews`.
    """
    # Imported here, because it takes two seconds and only regression needs it.
    from scipy import stats

    labels, values = (side.astype(np.float64) for side in _checked(labels, values))
    if not np.all(np.isfinite([labels, values])):
        return math.nan
    if np.all(labels == labels[0]) or np.all(values == values[0]):
        return 0.0
    return float(stats.pearsonr(labels, values).statistic)


def spearman(labels: Real[np.ndarray, " n"], values: Real[np.ndarray, " n"]) -> float:
    """Returns Spearman's correlation: `pearson` of the ranks, where equal numbers have the mean of their ranks."""
    from scipy import stats

    sides = _checked(labels, values)
    return pearson(*map(stats.rankdata, sides)) if np.all(np.isfinite(sides)) else math.nan


def of_part[Value](part: str, values: Mapping[str, Value]) -> dict[str, Value]:
    """Returns metrics under names that begin with that of a part of the held-out data, if it has one."""
    return {f"{part}_{name}" if part else name: value for name, value in values.items()}


def _checked(
    labels: Num[np.ndarray, " n"], predicted: Num[np.ndarray, " n"]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    labels, predicted = np.asarray(labels), np.asarray(predicted)
    if labels.ndim != 1 or labels.shape != predicted.shape or not len(labels):
        raise ValueError(
            f"there are {labels.shape} labels and {predicted.shape} predictions; a metric needs equal "
            f"numbers of both, at least one, in one dimension"
        )
    return labels, predicted
