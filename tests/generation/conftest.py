"""Fixtures of the tests of generation."""

from tests.trained import trained  # noqa: F401
