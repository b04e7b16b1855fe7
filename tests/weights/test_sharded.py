"""Tests that a model of several files is loaded over devices slice by slice."""

import contextlib
import tracemalloc

import jax
import numpy as np
import pytest
from flax import nnx

from sympow_jax import config, models, weights
from sympow_jax.layers import partitioning
from sympow_jax.weights import tensors

FILE_BYTES = 1_500_000


def settings() -> config.Config:
    small = {"vocab_size": 1024, "layers": 2, "width": 256, "heads": 8, "kv_heads": 2, "mlp_width": 1024}
    sizes = config.MODEL_SIZES["llama3_8b"] | small | {"dtype": "float32"}
    model = config.ModelConfig(**sizes, attention=config.preset("llama3"))
    return config.Config(model=model, data=config.DataConfig(context_length=16, batch_tokens=128))


class Counted:
    def __init__(self, tensor, reads: list[int]):
        self._tensor, self._reads = tensor, reads
        self.get_shape, self.get_dtype = tensor.get_shape, tensor.get_dtype

    def __getitem__(self, index):
        array = self._tensor[index]
        self._reads.append(array.nbytes)
        return array


@pytest.mark.parametrize("sizes", [{"fsdp": 4, "tensor": 2}, {"data": 8}], ids=["divided", "whole"])
def test_slices_are_read_straight_to_a_mesh(tmp_path, monkeypatch, sizes):
    """Every byte is read once, and the peak is a fraction of the model."""
    expected = models.make(settings().model, settings().task, rngs=0)
    weights.save_pretrained(tmp_path, settings(), expected, max_file_bytes=FILE_BYTES)
    weights.from_pretrained(tmp_path)  # imports and caches are not measured
    shape = [sizes.get(axis, 1) for axis in partitioning.AXES]
    mesh = jax.make_mesh(shape, partitioning.AXES, axis_types=(jax.sharding.AxisType.Auto,) * len(shape))
    reads, opened = [], tensors.opened

    @contextlib.contextmanager
    def counted(path):
        with opened(path) as stored:
            yield {name: Counted(tensor, reads) for name, tensor in stored.items()}

    monkeypatch.setattr(tensors, "opened", counted)
    tracemalloc.start()
    _, model = weights.from_pretrained(tmp_path, mesh=mesh)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    wanted = dict(nnx.to_flat_state(nnx.state(expected)))
    made = dict(nnx.to_flat_state(nnx.state(model)))
    for path, leaf in wanted.items():
        np.testing.assert_array_equal(made[path][...], leaf[...])
    shardings = {
        path: jax.NamedSharding(mesh, partitioning.fit(spec, made[path][...].shape, mesh.shape))
        for path, spec in models.parameter_specs(expected).items()
    }
    assert all(made[path][...].sharding == sharding for path, sharding in shardings.items())
    divided = sum(not made[path][...].sharding.is_fully_replicated for path in shardings)
    assert divided == (0 if "data" in sizes else 16)
    sizes = [leaf[...].nbytes for leaf in wanted.values()]
    assert sum(reads) == sum(sizes)
    assert peak - kept < 2.5 * max(sizes) < sum(sizes) / 3
