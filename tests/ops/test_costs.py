"""The choice of a form: by FLOPs, or by the predicted times of kernels."""

import functools

import pytest

from sympow_jax.ops._power import costs

PAPERS = {
    "batch": 8,
    "heads": 12,
    "kv_heads": 12,
    "head_dim": 64,
    "value_dim": 64,
    "window": 64,
    "chunk": None,
}
TABLE = PAPERS | {"batch": 1, "heads": 8, "kv_heads": 8, "time": 65_536}
BOTH = ("attention", "chunked")


@pytest.mark.parametrize(
    ("power", "head_dim", "value_dim", "milliseconds"),
    [
        (2, 16, 16, 3.5),
        (2, 32, 32, 4.3),
        (2, 64, 64, 5.8),
        (2, 128, 128, 11.1),
        (2, 64, 128, 8.4),
        (4, 16, 16, 3.9),
        (4, 64, 64, 6.1),
        (4, 128, 128, 11.1),
        (6, 64, 64, 6.5),
    ],
)
def test_attention_takes_what_its_kernel_is_predicted_to_take(power, head_dim, value_dim, milliseconds):
    shape = TABLE | {"power": power, "head_dim": head_dim, "value_dim": value_dim}
    assert 1e3 * costs.kernel_seconds("attention", **shape) == pytest.approx(milliseconds, rel=0.02)


@pytest.mark.parametrize(
    ("power", "size", "least", "most"), [(2, 64, 0.9, 1.1), (4, 16, 1.1, 1.6), (4, 32, 9, 10)]
)
def test_chunked_takes_what_all_of_it_is_predicted_to_take(power, size, least, most):
    shape = TABLE | {"power": power, "head_dim": size, "value_dim": size}
    assert least <= 1e3 * costs.kernel_seconds("chunked", **shape) <= most


def test_shared_keys_update_fewer_states():
    shape = TABLE | {"power": 2}
    saved = costs.kernel_seconds("chunked", **shape) - costs.kernel_seconds(
        "chunked", **shape | {"kv_heads": 1}
    )
    # Seven of eight heads' update, which is half of what states take.
    assert saved == pytest.approx(costs.HOPPER.states(7 / 2 * 65_536, 2, 64, 64))


def crossover(**shape):
    """The first power of 2^(1/4) at which the chunked form is chosen."""
    choose = functools.partial(costs.cheapest_form, **PAPERS | shape)
    return next(time for n in range(4 * 8, 4 * 21) if choose(time=(time := int(2 ** (n / 4)))) == "chunked")


@pytest.mark.parametrize(
    ("shape", "least", "most"),
    [
        ({"power": 2}, 4096, 8192),
        ({"power": 2, "batch": 1, "heads": 8, "kv_heads": 8}, 6000, 8192),
        ({"power": 2, "head_dim": 128, "value_dim": 128}, 8192, 20_000),
        ({"power": 4, "head_dim": 16, "value_dim": 16}, 8192, 20_000),
        ({"power": 4, "head_dim": 32, "value_dim": 32}, 50_000, 120_000),
    ],
)
def test_kernels_cross_where_their_times_do(shape, least, most):
    assert least < crossover(**shape, kernels=BOTH) <= most


def test_few_heads_wait_for_longer_contexts_to_pay_for_launches():
    assert crossover(power=2, kernels=BOTH) < crossover(power=2, batch=1, heads=1, kv_heads=1, kernels=BOTH)


def test_without_kernels_flops_decide():
    # 2 (D + E) T / 2 and 4 F E + (D + E) (128 + 2 W).
    assert costs.default_chunk("chunked") == 128
    assert 4160 + 256 < crossover(power=2) < 1.2 * (4160 + 256)
    assert crossover(power=2) == crossover(power=2, batch=1)


def test_power_4_at_head_size_64_keeps_pairs_to_a_million_tokens():
    for kernels in ((), ("attention",)):
        form = costs.cheapest_form(**PAPERS | {"batch": 1}, power=4, time=2**20, kernels=kernels)
        assert form == "attention"
