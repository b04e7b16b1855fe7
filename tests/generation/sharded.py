"""Generates with a small model over eight simulated devices, for tests.

    python -m tests.generation.sharded '["conformal", 2, 4, {"data": 2, "tensor": 2}]' ...

The arguments are a preset, the number of key/value heads, the number of prompts, and a mesh shape, on as many of the
devices. Prints a line of JSON for each: whether tokens equal those of one device, and the partition specs of the states
after `init_state`, `prefill`, `decode` and `fold`, each once. Runs in a separate process, since it needs more devices
than the other tests have.
"""

import dataclasses
import functools
import json
import math
import sys

import jax
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
    logits, state = program.prefill(small.tokens(rows, 21), lengths, state=states[0])
    states += [state, program.decode(state, logits.argmax(-1))[1]]
    if None not in model.kv_cache_lengths:
        states.append(program.fold(state))
    specs = [
        {jax.tree_util.keystr(path[2:]): spec(x) for path, x in jax.tree_util.tree_leaves_with_path(state)}
        for state in states
    ]
    return {"equal": bool((actual == expected).all()), "varied": len(np.unique(actual)), "specs": specs}


def spec(x: jax.Array) -> list:
    """Returns the axes that shard each dimension, without a tail of None."""
    axes = list(x.sharding.spec)
    while axes and axes[-1] is None:
        axes.pop()
    return axes


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    for text in sys.argv[1:]:
        print(json.dumps(compare(*json.loads(text))), flush=True)
