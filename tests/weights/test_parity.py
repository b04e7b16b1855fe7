"""Tests against the package `transformers` itself, on the CPU, which run if it is installed.

    uv run --with torch,transformers pytest tests/weights/test_parity.py

`retention` has the attention of Brumby and PowerCoder. If it is installed too, the formula of `power_models` is
compared with it.
"""

import jax
import numpy as np
import pytest
from flax import nnx

from sympow_jax import weights
from sympow_jax.weights import families
from tests.ops import cases
from tests.weights import originals, power_models

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

BOUND = 1e-5


@nnx.jit
def logits(model, tokens):
    return model(tokens)


@pytest.fixture(scope="module", params=originals.MODELS)
def original(request, tmp_path_factory):
    """Makes a model with other weights than the fixture of its name, and its folder."""
    model = originals.make(request.param, seed=1)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return model, folder


@pytest.mark.parametrize("max_file_bytes", [5_000, 10**9], ids=["shards", "one file"])
def test_transformers_opens_what_is_saved_with_the_same_logits(original, tmp_path, max_file_bytes):
    model, folder = original
    settings, ours = weights.from_pretrained(folder)
    weights.save_pretrained(tmp_path / "saved", settings, ours, max_file_bytes=max_file_bytes)
    again, found = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", attn_implementation="eager", output_loading_info=True
    )
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    assert again.config.model_type == families.find(settings).model_type
    for (name, x), (other, y) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(x, y)
    tokens = originals.tokens()
    np.testing.assert_array_equal(originals.logits(again, tokens), originals.logits(model, tokens))


def test_shards_and_bfloat16_of_transformers(original, tmp_path):
    model, folder = original
    model.save_pretrained(tmp_path, max_shard_size="5KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    (_, shards), (settings, whole) = weights.from_pretrained(tmp_path), weights.from_pretrained(folder)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(shards), nnx.state(whole))
    weights.save_pretrained(tmp_path / "saved", settings, whole, dtype="bfloat16")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype="auto")
    assert {x.dtype for x in again.parameters()} == {torch.bfloat16}


def test_the_formula_of_power_models_is_that_of_retention():
    retention = pytest.importorskip("retention.reference")
    generator = np.random.default_rng(0)
    query, key, value = (generator.normal(size=(30, heads, 16)) for heads in (4, 2, 2))
    log_gates = -np.log1p(np.exp(-generator.normal(size=(30, 2))))
    batched = [torch.tensor(x[None], dtype=torch.float32) for x in (query, key, value, log_gates)]
    expected = retention.power_retention(*batched, deg=2)[0].numpy()
    assert cases.error(power_models.attention(query, key, value, log_gates), expected) <= 1e-6
