"""Angles position * rate with whole turns removed in rational arithmetic."""

import fractions

import numpy as np

# pi to 100 digits.
PI = fractions.Fraction(
    31415926535897932384626433832795028841971693993751058209749445923078164062862089986280348253421170679,
    10**100,
)
POSITIONS = np.array([0, 1, 77, 2**20, 2**20 + 77, 2**31 - 1], np.int32)


def angles(positions, rates, turn=2 * PI) -> np.ndarray:
    """Returns positions * rates in radians, in [-pi, pi], float64; `turn` is one turn in the unit of the rates."""
    radians = np.empty((np.size(positions), np.size(rates)))
    for i, position in enumerate(np.ravel(positions)):
        for j, rate in enumerate(np.ravel(rates)):
            turns = int(position) * fractions.Fraction(float(rate)) / turn
            radians[i, j] = (turns - round(turns)) * 2 * PI
    return radians.reshape(*np.shape(positions), *np.shape(rates))


def largest_difference(actual, expected) -> float:
    difference = np.asarray(actual, np.float64) - expected
    return 2 * np.abs(np.sin(difference / 2)).max()
