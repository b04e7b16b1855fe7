"""Tests of sampling: the drawn tokens, the eligible tokens, and the dependence on the key."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sympow_jax import generation

DRAWS = 4096
PROBABILITIES = np.array([0.5, 0.25, 0.15, 0.1])


def draws(seed=0, probabilities=PROBABILITIES, **settings):
    """Draws one token at each of many positions."""
    logits = jnp.broadcast_to(jnp.log(probabilities), (DRAWS, len(probabilities)))
    sampling = generation.Sampling(**settings)
    position = jnp.arange(DRAWS)
    return np.asarray(generation.sample(logits, sampling, seed=np.uint32(seed), position=position))


def frequencies(*arguments, **settings):
    return np.bincount(draws(*arguments, **settings), minlength=4) / DRAWS


def close(counts, expected):
    """Checks that means agree within five standard deviations."""
    expected = np.array(expected)
    bound = 5 * np.sqrt(expected * (1 - expected) / DRAWS)
    np.testing.assert_array_less(np.abs(counts - expected), bound + 1e-9)


def test_probabilities():
    close(frequencies(), PROBABILITIES)
    squared = PROBABILITIES**2 / (PROBABILITIES**2).sum()
    close(frequencies(temperature=0.5), squared)
    assert (draws(temperature=0) == 0).all()


def test_the_likeliest_alone():
    close(frequencies(top_k=2), [2 / 3, 1 / 3, 0, 0])
    close(frequencies(top_k=9), PROBABILITIES)
    close(frequencies(top_k=10**30), PROBABILITIES)
    close(frequencies(top_p=0.8), [5 / 9, 2.5 / 9, 1.5 / 9, 0])
    close(frequencies(top_p=0.5), [1, 0, 0, 0])
    # top_p is applied after top_k, which leaves the first token with 2/3, more than top_p.
    close(frequencies(top_k=2, top_p=0.6), [1, 0, 0, 0])
    # top_p is applied after the temperature.
    close(frequencies(top_p=0.7, temperature=0.5), [1, 0, 0, 0])
    assert (draws(top_p=1e-9) == 0).all()


def test_ties_do_not_exceed_top_k():
    counts = np.bincount(draws(probabilities=np.full(4, 0.25), top_k=3), minlength=4)
    assert (counts > 0).sum() == 3


def test_ids_that_are_never_drawn():
    close(frequencies(vocab_size=2), [2 / 3, 1 / 3, 0, 0])
    assert (draws(probabilities=PROBABILITIES[::-1], temperature=0, vocab_size=3) == 2).all()


def test_seed_and_position_decide():
    assert (draws(seed=0) == draws(seed=0)).all()
    assert (draws(seed=0) != draws(seed=1)).any()
    logits = jax.random.normal(jax.random.key(0), (3, 8))
    positions = jnp.array([4, 9, 4])
    sample = lambda rows: generation.sample(  # noqa: E731
        logits[rows], generation.Sampling(), seed=np.uint32(7), position=positions[rows]
    )
    together = sample(np.array([0, 1, 2]))
    for row in range(3):
        assert sample(np.array([row]))[0] == together[row]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_p": 0.0}, "top_p is 0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_p": float("nan")}, "top_p is nan"),
    ],
)
def test_mistakes(settings, message):
    with pytest.raises(ValueError, match=message):
        generation.Sampling(**settings)
