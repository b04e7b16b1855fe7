"""Marks of tests that need more than Python packages of the project."""

import pytest

from tools import h100

__all__ = ["needs_compiler"]

needs_compiler = pytest.mark.skipif(
    bool(h100.missing()), reason=f"needs {', '.join(h100.missing())}: uv sync --group h100"
)
