"""Compiles a gradient for an H100 whose queries, keys and values are rounded from float32 in the same program.

python -m tests.pallas_kernels.narrowed    # prints how many arrays of 16 bits it writes before the first kernel
"""

import jax
import jax.numpy as jnp

from sympow_jax import ops
from tools import h100

SHAPE = (1, 256, 4, 64)


def written() -> int:
    """Returns the number of bfloat16 arrays of queries, keys and values that are written before the first kernel."""

    def loss(*arrays):
        narrow = [jnp.sin(x).astype(jnp.bfloat16) for x in arrays]
        options = {"form": "attention", "implementation": "mosaic_gpu"}
        return ops.power_attention(*narrow, power=2, **options).astype(jnp.float32).sum()

    arrays = [jax.ShapeDtypeStruct(SHAPE, jnp.float32)] * 3
    arrays = [jax.ShapeDtypeStruct(SHAPE, jnp.float32)] * 3
    program = h100.compile_for(h100.mesh(), jax.grad(loss, (0, 1, 2)), *arrays).as_text()
    before = program[program.index("\nENTRY") :].split("power_attention_forward")[0]
    kind = f"bf16[{','.join(map(str, SHAPE))}]"
    return sum(line.split(" fusion(")[0].count(kind) for line in before.splitlines() if " fusion(" in line)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    print(written())
