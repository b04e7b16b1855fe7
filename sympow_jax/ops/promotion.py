"""Rules of JAX for arrays of different ranks and dtypes, which callers may have made stricter."""

import contextlib
import functools
from collections.abc import Callable, Iterator

import jax


@contextlib.contextmanager
def default_rules() -> Iterator[None]:
    """Computes by JAX's default rules of promotion, whatever `jax_numpy_rank_promotion` is.

    The same holds for `jax_numpy_dtype_promotion`. JAX traces derivative rules on their own, so that these need the
    rules in addition to the functions that use them.
    """
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def by_default_rules[**P, R](f: Callable[P, R]) -> Callable[P, R]:
    """Makes f compute by `default_rules`."""

    @functools.wraps(f)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with default_rules():
            return f(*args, **kwargs)

    return call
