"""Tests that the model of kernel times gives the predictions in pallas_kernels/README.md."""

import pytest

from tools import predicted

pytestmark = pytest.mark.robust

TABLE = {
    "batch": 1,
    "heads": 8,
    "kv_heads": 8,
    "head_dim": 64,
    "value_dim": 64,
    "exact_window": 64,
}
TABLE |= {"time": 65_536}


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
    assert 1e3 * predicted.kernel_seconds("attention", **shape) == pytest.approx(milliseconds, rel=0.02)


@pytest.mark.parametrize(
    ("power", "size", "least", "most"), [(2, 64, 0.9, 1.1), (4, 16, 1.1, 1.6), (4, 32, 9, 10)]
)
def test_chunked_takes_what_all_of_it_is_predicted_to_take(power, size, least, most):
    shape = TABLE | {"power": power, "head_dim": size, "value_dim": size}
    assert least <= 1e3 * predicted.kernel_seconds("chunked", **shape) <= most


def test_shared_keys_update_fewer_states():
    shape = TABLE | {"power": 2}
    saved = predicted.kernel_seconds("chunked", **shape) - predicted.kernel_seconds(
        "chunked", **shape | {"kv_heads": 1}
    )
    # The update of seven of eight heads, which is half of the time that states take.
    assert saved == pytest.approx(predicted.state_seconds(7 / 2 * 65_536, 2, 64, 64))
