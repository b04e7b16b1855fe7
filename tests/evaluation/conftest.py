"""Fixtures of the tests of evaluation."""

from tests.trained import trained  # noqa: F401
