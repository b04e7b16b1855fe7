"""Loads a model of several files over simulated devices, for tests, and measures what is read.

    python -m tests.weights.sharded FOLDER '{"fsdp": 4, "tensor": 2}' ...

Writes the model to the folder, loads it over each mesh shape and prints a line of JSON for each: whether all parameters
and shardings are right, the bytes of the files and of the largest parameter, the bytes that were read, and the peak of
memory that is not the model's own. Runs in a separate process, since it needs eight devices.
"""

import collections
import json
import pathlib
import sys
import tracemalloc

import jax
import numpy as np
from flax import nnx

from sympow_jax import config, models, training, weights
from sympow_jax.layers import partitioning
from sympow_jax.weights import tensors

FILE_BYTES = 1_500_000


def settings() -> config.Config:
    """Returns the settings of a Llama with matrices of up to a megabyte."""
    model = config.ModelConfig(
        vocab_size=1024,
        layers=2,
        width=256,
        heads=8,
        kv_heads=2,
        mlp_width=1024,
        activation="swiglu",
        norm="rms",
        embedding_norm=False,
        tied_head=False,
        dtype="float32",
        attention=config.preset("llama3"),
    )
    return config.Config(model=model, data=config.DataConfig(context_length=16, batch_tokens=128))


def load(folder: pathlib.Path, sizes: dict[str, int], expected: models.Model) -> dict:
    """Loads the model over a mesh of these sizes; returns the results."""
    shape = [sizes.get(axis, 1) for axis in partitioning.AXES]
    mesh = jax.make_mesh(shape, partitioning.AXES, axis_types=(jax.sharding.AxisType.Auto,) * len(shape))
    reads: collections.Counter[str] = collections.Counter()
    read = tensors.Tensors.read

    def counted(self, name, index):
        array = read(self, name, index)
        reads[name] += array.nbytes
        return array

    tensors.Tensors.read = counted
    tracemalloc.start()
    _, model = weights.from_pretrained(folder, mesh=mesh)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    tensors.Tensors.read = read
    wanted = nnx.to_flat_state(nnx.state(expected))
    made = dict(nnx.to_flat_state(nnx.state(model)))
    placed = training.Program(settings(), mesh).abstract.params
    shardings = {}
    for path, leaf in jax.tree.leaves_with_path(placed):
        first, *rest = (key.key for key in path)
        if first != "stacked_blocks":
            shardings[first, *rest] = leaf.sharding
            continue
        # A parameter of a layer is sharded as that of all layers, whose first axis is theirs.
        spec = jax.sharding.PartitionSpec(*leaf.sharding.spec[1:])
        for layer in range(settings().model.layers):
            shardings["blocks", layer, *rest[1:]] = jax.sharding.NamedSharding(mesh, spec)
    return {
        "equal": all(np.array_equal(made[path][...], leaf[...]) for path, leaf in wanted),
        "sharded": all(
            made[path][...].sharding.is_equivalent_to(sharding, made[path][...].ndim)
            for path, sharding in shardings.items()
        ),
        "divided": sum(not made[path][...].sharding.is_fully_replicated for path in shardings),
        "largest": max(leaf[...].nbytes for _, leaf in wanted),
        "bytes": sum(leaf[...].nbytes for _, leaf in wanted),
        "read": reads.total(),
        "overhead": peak - kept,
    }


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    folder = pathlib.Path(sys.argv[1])
    model = models.make(settings().model, settings().task, rngs=0)
    weights.save_pretrained(folder, settings(), model, max_file_bytes=FILE_BYTES)
    weights.from_pretrained(folder)  # imports and caches are not measured
    for sizes in sys.argv[2:]:
        print(json.dumps(load(folder, json.loads(sizes), model)), flush=True)
