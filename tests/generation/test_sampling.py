"""Tests of sampling: the drawn tokens, the eligible tokens, and the dependence on the key."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sympow_jax import generation

DRAWS = 4096
PROBABILITIES = np.array([0.5, 0.25, 0.15, 0.1])


def draws(seed=0, probabilities=PROBABILITIES, **settings):
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


def eligible(logits, seen, *, temperature, top_k, top_p, min_p, repetition_penalty):
    """Returns the probabilities of a row in float64, with each option as its paper states it, one after another."""
    logits = logits.astype(np.float64)
    for token in np.flatnonzero(seen):
        logits[token] *= 1 / repetition_penalty if logits[token] > 0 else repetition_penalty
    logits /= temperature
    order = np.argsort(-logits, kind="stable")
    logits[order[top_k:]] = -np.inf
    weights = np.exp(logits - logits.max())
    weights /= weights.sum()
    count = np.searchsorted(np.cumsum(weights[order]), top_p) + 1
    weights[order[count:]] = 0
    weights[weights < min_p * weights.max()] = 0
    return weights / weights.sum()


OPTIONS = [
    {},
    {"temperature": 0.5},
    {"top_k": 2},
    {"top_k": 10**30},
    {"top_p": 0.8},
    {"top_k": 3, "top_p": 0.6},
    {"min_p": 0.1},
    {"top_p": 0.74, "min_p": 0.4},
    {"repetition_penalty": 0.6, "temperature": 0.7},
    {"repetition_penalty": 1.3, "temperature": 1.4, "top_k": 9, "top_p": 0.9, "min_p": 0.2},
]


def test_probabilities_in_float64():
    """Logits of both signs; every row has seen other tokens."""
    everything = {"temperature": 1.0, "top_k": 12, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    rows = 3
    logits = np.asarray(2 * jax.random.normal(jax.random.key(1), (rows, 12)))
    seen = np.asarray(jax.random.bernoulli(jax.random.key(2), 0.5, (rows, 12)))
    assert (logits[seen] > 0).any()
    assert (logits[seen] < 0).any()
    for options in OPTIONS:
        tokens = generation.sample(
            jnp.repeat(logits, DRAWS, axis=0),
            generation.Sampling(**options),
            seed=np.uint32(0),
            position=jnp.arange(rows * DRAWS),
            seen=jnp.repeat(seen, DRAWS, axis=0),
        )
        for row, drawn in enumerate(np.asarray(tokens).reshape(rows, DRAWS)):
            expected = eligible(logits[row], seen[row], **everything | options)
            counts = np.bincount(drawn, minlength=12) / DRAWS
            assert (counts[expected == 0] == 0).all()
            close(counts, expected)


def test_a_penalty_of_the_likeliest_token():
    logits, seen = jnp.array([[2.0, 1.5, -1.0]]), jnp.array([[True, False, False]])
    greedy = generation.Sampling(temperature=0, repetition_penalty=1.5)
    sample = functools.partial(generation.sample, seed=np.uint32(0), position=jnp.zeros(1, jnp.int32))
    assert sample(logits, greedy, seen=seen) == 1
    assert sample(-logits, greedy, seen=~seen) == 2
    with pytest.raises(ValueError, match="which needs the seen tokens; pass seen"):
        sample(logits, greedy)


def test_ties_do_not_exceed_top_k_and_ids_beyond_the_vocabulary_are_never_drawn():
    counts = np.bincount(draws(probabilities=np.full(4, 0.25), top_k=3), minlength=4)
    assert (counts > 0).sum() == 3
    close(frequencies(vocab_size=2), [2 / 3, 1 / 3, 0, 0])
    assert (draws(probabilities=PROBABILITIES[::-1], temperature=0, vocab_size=3) == 2).all()


def test_a_temperature_that_is_nearly_0_is_greedy():
    logits = jnp.array([[1.0, 5.0, 4.999, -3.0], [2.0, -jnp.inf, 9.0, 8.0], [-1e30, 1e30, 3e38, -3e38]])
    for temperature, seed in itertools.product((0, 1e-45, 1e-30, 1e-10), range(2)):
        sampling = generation.Sampling(temperature=temperature)
        tokens = generation.sample(logits, sampling, seed=jnp.uint32(seed), position=jnp.arange(3))
        assert tokens.tolist() == [1, 2, 2]


def test_seed_and_position_decide_and_flags_of_jax_do_not():
    expected = draws(seed=0)
    assert (expected != draws(seed=1)).any()
    with jax.default_prng_impl("rbg"), jax.threefry_partitionable(False):
        assert (draws(seed=0) == expected).all()
    logits = jax.random.normal(jax.random.key(0), (3, 8))
    positions = jnp.array([4, 9, 4])
    sample = lambda rows: generation.sample(  # noqa: E731
        logits[rows], generation.Sampling(), seed=np.uint32(7), position=positions[rows]
    )
    together = sample(np.array([0, 1, 2]))
    for row in range(3):
        assert sample(np.array([row]))[0] == together[row]


def test_a_seed_per_row():
    logits = jnp.broadcast_to(jnp.log(PROBABILITIES), (DRAWS, 4))
    seeds, position = jnp.arange(DRAWS, dtype=jnp.uint32), jnp.full(DRAWS, 5)
    sample = functools.partial(generation.sample, logits, generation.Sampling())
    together = sample(seed=seeds, position=position)
    close(np.bincount(together, minlength=4) / DRAWS, PROBABILITIES)
    for row in (0, 17):
        assert sample(seed=seeds[row], position=position)[row] == together[row]


def test_mistakes():
    nan, inf = float("nan"), float("inf")
    for name, values in {
        "temperature": (-0.1, nan, inf),
        "top_k": (0,),
        "top_p": (0.0, 1.5, nan),
        "min_p": (-0.1, 1.5, nan),
        "repetition_penalty": (0.0, inf, 1e-300),
        "vocab_size": (-3,),
    }.items():
        for value in values:
            with pytest.raises(ValueError, match=f"{name} is {value:g}; it must be"):
                generation.Sampling(**{name: value})
    for settings, message in (
        ({"temperature": 10**400}, "temperature is inf"),
        ({"temperature": jnp.ones(3)}, "temperature is Array.*; it must be a number"),
        ({"temperature": True}, "temperature is True; it must be a number"),
        ({"top_k": 2.5}, "top_k is 2.5; it must be an integer"),
    ):
        with pytest.raises(ValueError, match=message):
            generation.Sampling(**settings)
