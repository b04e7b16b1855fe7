"""Generates with a small model over eight simulated devices, for tests.

    python -m tests.generation.sharded '["conformal", 2, 4, {"data": 2, "tensor": 2}]' ...

The arguments are a preset, the number of key/value heads, the number of prompts, and a mesh shape, on as many of the
devices. Prints a line of JSON for each: whether tokens equal those of one device, and the partition specs of the states
after `init_state`, `prefill`, `decode` and `fold`, each once, or, for the argument `"rows"`, what `move_rows`
returns. Runs in a separate process, since it needs more devices than the other tests have.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sympow_jax import config, generation, models
from sympow_jax.layers import partitioning
from sympow_jax.training import sharding
from tests.generation import small

LENGTHS = (21, 3, 11, 9)


def on_mesh(model: models.DecoderLM, sizes: dict) -> models.DecoderLM:
    """Returns a model whose parameters are sharded as in training."""
    devices = jax.devices()[: math.prod(sizes.values())]
    mesh = sharding.mesh_of(config.ShardingConfig(**sizes), devices)
    specs = models.parameter_specs(model)
    graph, params = nnx.split(model)

    def place(path, x):
        spec = partitioning.fitted(specs[tuple(key.key for key in path)], x.shape, mesh.shape)
        return jax.device_put(x, jax.NamedSharding(mesh, spec))

    return nnx.merge(graph, jax.tree_util.tree_map_with_path(place, nnx.to_pure_dict(params)))


@functools.cache
def with_heads(preset: str, kv_heads: int) -> models.DecoderLM:
    model = small.model(preset)
    settings = dataclasses.replace(model.config, kv_heads=kv_heads)
    return model if settings == model.config else models.DecoderLM(settings, rngs=0)


def compare(preset: str, kv_heads: int, rows: int, sizes: dict) -> dict:
    one = with_heads(preset, kv_heads)
    model = on_mesh(one, sizes)
    program = generation.Program(model)
    prompts = [row[:length].tolist() for row, length in zip(small.tokens(rows, 40), LENGTHS)]
    sampling = generation.Sampling(temperature=0.9, top_p=0.9, repetition_penalty=1.1)
    options = {"max_tokens": 24, "sampling": sampling, "samples": 2, "block": 8}
    expected, actual = (
        np.concatenate(list(generation.generate(x, prompts, **options)), axis=1) for x in (one, model)
    )
    # A KV cache where there is one.
    states = [program.init_state(rows, max_length=24)]
    lengths = np.array(LENGTHS[:rows])
    logits, state = program.prefill(small.tokens(rows, 21), lengths, initial_state=states[0])
    states += [state, program.decode(state, logits.argmax(-1))[1]]
    if None not in model.kv_cache_lengths:
        states.append(program.fold(state))
    specs = [
        {jax.tree_util.keystr(path[2:]): spec(x) for path, x in jax.tree_util.tree_leaves_with_path(state)}
        for state in states
    ]
    return {"equal": bool((actual == expected).all()), "varied": len(np.unique(actual)), "specs": specs}


def move_rows() -> list:
    """Returns a case, the types of its results, and whether these equal those of one device, for each kind of mesh."""
    tree = {"logits": np.arange(32, dtype=np.float32).reshape(4, 8), "position": np.arange(4, dtype=np.int32)}
    calls = {
        "fork": lambda x: generation.fork(x, 2),
        "take": lambda x: generation.take(x, 2),
        "take_traced": lambda x: generation.take(x, jnp.int32(2)),
        "insert": lambda x: generation.insert(x, 2, generation.take(x, 1)),
        "insert_from_host": lambda x: generation.insert(x, 2, jax.tree.map(lambda y: y[1:2], tree)),
    }
    results = []
    for kind, (name, call) in itertools.product(jax.sharding.AxisType.__members__.values(), calls.items()):
        if kind is jax.sharding.AxisType.Manual:
            continue
        mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(kind,) * 2, devices=jax.devices()[:4])
        shardings = {"logits": jax.P("data", "tensor"), "position": jax.P("data")}
        placed = {
            field: jax.device_put(x, jax.NamedSharding(mesh, shardings[field])) for field, x in tree.items()
        }
        expected = call(tree)
        for scope, jitted in itertools.product((contextlib.nullcontext(), jax.set_mesh(mesh)), (False, True)):
            with scope:
                actual = (jax.jit(call) if jitted else call)(placed)
            equal = all(np.array_equal(actual[field], expected[field]) for field in tree)
            results.append([kind.name, name, [str(jax.typeof(x)) for x in actual.values()], equal])
    return results


def spec(x: jax.Array) -> list:
    """Returns the axes that shard each dimension, without a tail of None."""
    axes = list(x.sharding.spec)
    while axes and axes[-1] is None:
        axes.pop()
    return axes


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    for text in sys.argv[1:]:
        case = json.loads(text)
        print(json.dumps(move_rows() if case == "rows" else compare(*case)), flush=True)
