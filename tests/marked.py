"""Parametrized tests of which the default run has some cases and a marker the others."""

import pytest


def cases(names, often, *, slow=(), robust=(), ids=None):
    """Returns a decorator that parametrizes a test by cases of the default run, and by those of two markers."""
    one = isinstance(names, str)
    marked = [
        pytest.param(*([case] if one else case), marks=mark)
        for mark, some in ((pytest.mark.slow, slow), (pytest.mark.robust, robust))
        for case in some
    ]
    return pytest.mark.parametrize(names, [*often, *marked], ids=ids)
