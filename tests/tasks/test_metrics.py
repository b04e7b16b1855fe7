"""Tests of GLUE's metrics against hand-computed values and alternative formulas."""

import itertools

import numpy as np
import pytest

from sympow_jax.tasks import metrics

# TP 3, FN 1, FP 2, TN 4.
LABELS = np.array([1, 1, 1, 1, 0, 0, 0, 0, 0, 0])
PREDICTED = np.array([1, 1, 1, 0, 1, 1, 0, 0, 0, 0])


def test_worked_by_hand():
    assert metrics.accuracy(LABELS, PREDICTED) == 0.7
    assert metrics.f1(LABELS, PREDICTED) == pytest.approx(6 / 9, abs=1e-15)
    # (3 * 4 - 2 * 1) / sqrt(5 * 4 * 6 * 5)
    assert metrics.matthews(LABELS, PREDICTED) == pytest.approx(10 / np.sqrt(600), abs=1e-15)
    # Deviations -2 -1 0 1 2 and -2.2 -0.2 -1.2 1.8 1.8.
    values = np.array([1.0, 3.0, 2.0, 5.0, 5.0])
    expected = (4.4 + 0.2 + 1.8 + 3.6) / np.sqrt(10 * (4.84 + 0.04 + 1.44 + 3.24 + 3.24))
    assert metrics.pearson(np.arange(1, 6), values) == pytest.approx(expected, abs=1e-15)
    # Ranks 1 3 2 4.5 4.5: deviations -2 0 -1 1.5 1.5.
    expected = (4 + 0 + 0 + 1.5 + 3) / np.sqrt(10 * (4 + 0 + 1 + 2.25 + 2.25))
    assert metrics.spearman(np.arange(1, 6), values) == pytest.approx(expected, abs=1e-15)


def test_matthews_of_more_classes_is_the_covariance_of_one_hot_vectors():
    labels, predicted = np.random.default_rng(1).integers(4, size=(2, 50))
    x, y = (np.eye(4)[side] - np.eye(4)[side].mean(0) for side in (labels, predicted))
    expected = np.sum(x * y) / np.sqrt(np.sum(x * x) * np.sum(y * y))
    assert metrics.matthews(labels, predicted) == pytest.approx(expected, abs=1e-12)
    renamed = np.array([2, 3, 0, 1])
    assert metrics.matthews(renamed[labels], renamed[predicted]) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("scale", [1e-200, 1e-30, 1.0, 1e30, 1e200])
@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_correlations_do_not_depend_on_scale_and_offset(scale, offset):
    labels, values = np.random.default_rng(3).normal(size=(2, 100))
    expected = np.corrcoef(labels, values)[0, 1]
    assert metrics.pearson(labels, (values + offset) * scale) == pytest.approx(expected, abs=1e-10)
    assert metrics.pearson(labels, -values * scale) == pytest.approx(-expected, abs=1e-12)


def test_constant_predictions_score_zero():
    zeros, tenth = np.zeros(10, int), np.full(10, 0.1)
    assert metrics.matthews(LABELS, zeros) == metrics.matthews(zeros, LABELS) == 0
    assert metrics.matthews(zeros, zeros) == metrics.f1(zeros, zeros) == metrics.f1(LABELS, zeros) == 0
    for correlation, sides in itertools.product(
        (metrics.pearson, metrics.spearman), ((LABELS, tenth), (tenth, LABELS), (tenth, tenth))
    ):
        assert correlation(*sides) == 0


def test_half_precision_predictions_are_summed_in_double():
    labels = np.arange(5000)
    values = (labels % 7).astype(np.float16)
    expected = np.corrcoef(labels, labels % 7)[0, 1]
    assert metrics.pearson(labels, values) == pytest.approx(expected, abs=1e-12)


def test_errors():
    for metric in (metrics.accuracy, metrics.matthews, metrics.f1, metrics.pearson, metrics.spearman):
        for sides in ((LABELS, LABELS[1:]), (LABELS[:0], LABELS[:0]), (LABELS[:, None], LABELS[:, None])):
            with pytest.raises(ValueError, match="a metric needs equal numbers of both, at least one"):
                metric(*sides)
    for metric in (metrics.pearson, metrics.spearman):
        assert np.isnan(metric(np.array([1.0, 2.0]), np.array([1.0, np.inf])))
        assert np.isnan(metric(np.array([np.nan, 1.0]), np.array([1.0, 2.0])))
