"""Tests of every kernel compiled for an H100, on a machine without one."""

import collections
import math
import re

import pytest

from pallas_kernels.power_step import squares
from tests.pallas_kernels import marks
from tools import h100

pytestmark = [pytest.mark.h100, marks.needs_compiler]
# In all kernels except these, matrix products cost more than memory traffic.
WITHOUT_PRODUCTS = re.compile(
    "power_step|power_attention_(units|blocks|vjp|decays)|power_state_(units|decays|scales|join|recurrence)"
)
# These read their arguments without TMA.
WITHOUT_TMA = re.compile("power_attention_decays|power_state_(scales|join|recurrence)")
# Sizes of models that people train: head and value sizes of 64 at p = 2 and of 32 at p = 4.
COMMON = re.compile(r"p2-d64-e64|p2-d64-b64|d32-e32-c3072")


def every_case():
    """Returns every kernel with every case; all but the common sizes are slow."""
    modules = {name: h100.compiled(name) for name in h100.KERNELS}
    return [
        pytest.param(
            name, case, marks=() if COMMON.search(case) and case in module.CASES else pytest.mark.slow
        )
        for name, module in modules.items()
        for case in (*module.CASES, *module.RARE)
    ]


@pytest.mark.parametrize(("name", "case"), every_case())
def test_compiled(name, case):
    """Kernels of both passes spill nothing and, except the step, run wgmma asynchronously on tiles loaded by TMA."""
    kernels = h100.report(name, case)
    assert kernels
    for kernel in kernels:
        assert kernel.spill_bytes == 0, kernel
        assert not kernel.serialized, kernel
        assert kernel.tma_loads > 0 or WITHOUT_TMA.match(kernel.name), kernel
        assert kernel.short_dots == 0, kernel
        assert kernel.tf32 == 0, kernel
        assert kernel.hgmma > 0 or WITHOUT_PRODUCTS.match(kernel.name), kernel
        assert kernel.bulk_stores == bulk_stores_of(case), kernel
        # Reads beyond an end, of features or of time, rely on the zeros that TMA puts there.
        assert kernel.bulk_loads == 0, kernel


def bulk_stores_of(case):
    """Returns the number of contiguous stores that a kernel may have.

    Those of the fold store exactly the rows that a head has left. Such a store is clipped at the end of the whole
    array, not at the end of its slice's axis: past the last row of a head it would write into the next one.
    """
    fold = re.fullmatch(r"fold-p(\d+)-d(\d+)-.*", case)
    if fold is None:
        return 0
    power, width = map(int, fold.groups())
    ragged = math.comb(width + power - 1, power) % squares.ROWS != 0
    # For the state and for its normalizer: a whole tile, and the rows of the last tile.
    return 2 * (1 + ragged)


@pytest.mark.parametrize(
    "what",
    ["attention", "chunked"]
    + [pytest.param(f"training-{form}", marks=pytest.mark.slow) for form in ("attention", "chunked")],
)
def test_nothing_is_gathered_on_eight_devices(what):
    """With batch and heads sharded over a mesh, no kernel and no backward pass needs another device's shard."""
    text = h100.run("tests.pallas_kernels.sharded", what)
    assert ("power_attention" if what.endswith("attention") else "power_state") + "_" in text
    assert "mosaic_gpu" in text
    assert "all-gather" not in text
    assert "all-to-all" not in text
    # Only gradients of parameters are sums over devices.
    assert "all-reduce" not in text or what.startswith("training")


@pytest.mark.slow
def test_states_are_kept_or_computed_again():
    """Depending on the policy of a checkpoint there is one more update, and no unneeded kernel."""
    counts = {
        what: collections.Counter(re.findall(r"custom-call\S*\(.*(power_state_\w+)_mosaic_gpu", program))
        for what in ("chunked", "again")
        for program in [h100.run("tests.pallas_kernels.sharded", what)]
    }
    once, of_tokens, of_states = (
        [f"power_state_{name}" for name in names]
        for names in (
            ("query", "query_vjp", "key_vjp", "decays_vjp"),
            ("units", "decays"),
            ("scales", "update", "norms", "recurrence"),
        )
    )
    for what, folds in (("chunked", 2), ("again", 3)):
        expected = (
            dict.fromkeys(once, 1) | dict.fromkeys(of_tokens, folds - 1) | dict.fromkeys(of_states, folds)
        )
        assert counts[what] == expected


def test_xla_keeps_the_rounding_of_arguments():
    """Queries, keys and values that a program rounds to bfloat16 are written as such before any kernel reads them."""
    program = h100.run("tests.pallas_kernels.sharded", "rounded")
    before = program[program.index("\nENTRY") :].split("power_attention_forward")[0]
    # Constants, whose fusions read nothing, are not arguments.
    fusions = [line.split(" fusion(")[0] for line in before.splitlines() if " fusion(%" in line]
    assert sum(results.count("bf16[1,256,4,64]") for results in fusions) == 3
