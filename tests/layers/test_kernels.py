"""Tests of every kernel of the config: formula, streaming, state size, FLOPs, and use in a model."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sympow_jax import config, layers, models, ops
from sympow_jax.config import attention as attention_lib
from sympow_jax.layers.attention import kernels
from sympow_jax.ops import target
from tests.ops.cases import error

BATCH, TIME, HEADS, KV_HEADS, SIZE = 2, 21, 4, 2, 8
SEGMENT_IDS = np.array([[0] * 9 + [-1] * 2 + [1] * 10, [3] * TIME], np.int32)


def features(x):
    return np.where(x > 0, x + 1, np.exp(x))


def mean(weigh):
    def mix(q, k, decay, delta):
        weights = weigh(q, k) * decay
        total = weights.sum(-1, keepdims=True)
        return weights / np.where(total == 0, 1, total)

    return mix


def overwrite(q, k, decay, delta):
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    written = np.linalg.inv(np.eye(len(k)) + np.tril(delta[:, None] * decay * (k @ k.T) ** 2, -1)) * delta
    return (decay * (q @ k.T) ** 2) @ written


@dataclasses.dataclass(frozen=True)
class Case:
    # Weights of values, from queries, keys, the decays between tokens, 0 where a key is not seen, and write strengths.
    mix: object
    memory: type
    policy: kernels.CachePolicy
    changes: dict = dataclasses.field(default_factory=dict)
    # Elements of a state per key/value head with its normalizer; None if there is none.
    elements: int | None = None
    # Number of tokens that a query attends to; None for all.
    window: int | None = None

    def kernel(self, name, **changes):
        """Returns the config of the kernel in float32, without positions, which belong to the layer."""
        options = (
            {"decay": "learned", "position": "none", "exact_window": 4, "chunk_size": 8}
            | self.changes
            | changes
        )
        attention = config.AttentionConfig(kernel=name, **options)
        return kernels.make(attention, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=SIZE)


KERNELS = {
    "power": Case(
        mean(lambda q, k: np.einsum("td,sd->ts", q, k) ** 2),
        ops.PowerState,
        kernels.CachePolicy.NEVER,
        {"form": "chunked"},
        elements=36 * (SIZE + 1),
    ),
    "linear": Case(
        mean(lambda q, k: features(q) @ features(k).T),
        ops.LinearState,
        kernels.CachePolicy.NEVER,
        elements=SIZE * (SIZE + 1),
    ),
    "power_delta": Case(
        overwrite,
        ops.DeltaState,
        kernels.CachePolicy.NEVER,
        {"negative_eigenvalues": True, "form": "attention"},
        elements=36 * SIZE,
    ),
    "softmax": Case(
        mean(lambda q, k: np.exp(q @ k.T / np.sqrt(SIZE))), ops.KVCache, kernels.CachePolicy.ALWAYS
    ),
    "expressive": Case(
        mean(lambda q, k: (q @ k.T) ** 2 / (1 + (q @ k.T) ** 2)), ops.KVCache, kernels.CachePolicy.ALWAYS
    ),
    "sliding_window": Case(
        mean(lambda q, k: np.exp(q @ k.T / np.sqrt(SIZE))),
        ops.KVCache,
        kernels.CachePolicy.ALWAYS,
        {"window": 6},
        window=6,
    ),
}
EACH = pytest.mark.parametrize("name", KERNELS)


def arrays():
    random = np.random.default_rng(0)
    query = random.normal(size=(BATCH, TIME, HEADS, SIZE))
    key, value = random.normal(size=(2, BATCH, TIME, KV_HEADS, SIZE))
    log_decay = -random.exponential(0.1, size=(BATCH, TIME, KV_HEADS))
    delta = random.uniform(0, 2, size=(BATCH, TIME, KV_HEADS))
    return tuple(x.astype(np.float32) for x in (query, key, value, log_decay, delta))


def formula(case, query, key, value, log_decay, delta, segment_ids):
    out = np.zeros(query.shape)
    sums = np.cumsum(np.where(segment_ids[..., None] < 0, 0, log_decay), axis=1, dtype=np.float64)
    ages = np.arange(TIME)[:, None] - np.arange(TIME)
    for row, ids in enumerate(segment_ids):
        seen = (ages >= 0) & (ids[:, None] == ids) & (ids >= 0) & (ids[:, None] >= 0)
        if case.window is not None:
            count = np.cumsum(ids >= 0)
            seen &= count[:, None] - count < case.window
        for head in range(HEADS):
            kv_head = head * KV_HEADS // HEADS
            between = sums[row, :, None, kv_head] - sums[row, None, :, kv_head]
            decay = np.where(seen, np.exp(np.where(seen, between, 0)), 0)
            q, k, v, d = (
                x.astype(np.float64)
                for x in (query[row, :, head], *(y[row, :, kv_head] for y in (key, value, delta)))
            )
            out[row, :, head] = case.mix(q, k, decay, d) @ v
    return out


def test_every_kernel_of_the_config_is_here():
    assert set(KERNELS) == set(attention_lib.KERNELS)
    for name, case in KERNELS.items():
        assert isinstance(case.kernel(name), kernels.Kernel)
        assert case.kernel(name) == case.kernel(name)  # static in a graph
        assert hash(case.kernel(name)) == hash(case.kernel(name))


@EACH
def test_attention_and_weights_are_the_formula(name):
    case, (query, key, value, log_decay, delta) = KERNELS[name], arrays()
    kernel, options = case.kernel(name), {"rotate": None, "log_decay": log_decay, "segment_ids": SEGMENT_IDS}
    options |= {"delta": delta} if kernel.largest_delta else {}

    @jax.jit
    def both(query, key, value):
        return kernel.attend(query, key, value, **options), kernel.weights(query, key, **options)

    out, weights = both(query, key, value)
    expected = formula(case, query, key, value, log_decay, delta, SEGMENT_IDS)
    assert error(out, expected) < 2e-6
    mixed = np.einsum("btns,bsne->btne", weights, np.repeat(value, HEADS // KV_HEADS, axis=2))
    assert error(mixed, expected) < 2e-6


@EACH
def test_the_memory_of_a_kernel(name):
    case = KERNELS[name]
    kernel = case.kernel(name)
    assert kernel.cache_policy is case.policy
    assert kernel.max_cache_length == (None if case.policy is kernels.CachePolicy.ALWAYS else 0)
    if case.elements is not None:
        assert kernel.state_bytes() == 4 * KV_HEADS * case.elements
        assert type(kernel.init_state(BATCH)) is case.memory
        return
    with pytest.raises(ValueError, match=f"kernel '{name}' has no recurrent state"):
        kernel.init_state(1)
    if case.window is not None:
        assert kernel.cache_limit == case.window - 1
        assert kernel.state_bytes() == 4 * KV_HEADS * 2 * SIZE * (case.window - 1)
        return
    with pytest.raises(ValueError, match=f"kernel '{name}' has no recurrent state"):
        kernel.state_bytes()


@EACH
def test_a_layer_and_models_take_it_by_name(name):
    """The memory of the layer is that of the kernel; tests of positions, and of windows, stream one."""
    layer = layers.Attention(16, KERNELS[name].kernel(name, position="rope"), rngs=0)
    assert type(layer.init_state(BATCH, max_length=TIME).memory) is KERNELS[name].memory
    shape = {"vocab_size": 32, "layers": 1, "width": 16, "heads": 2, "dtype": "float32"}
    attention = config.AttentionConfig(kernel=name, decay="none", position="rope")
    tokens = np.zeros((1, 9), np.int32)

    def output(method, attention, **task):
        model = config.ModelConfig(**shape, attention=attention)
        made = nnx.eval_shape(lambda: models.make(model, config.TaskConfig(**task), rngs=0))
        assert type(made.blocks[0].attention.kernel) is type(KERNELS[name].kernel(name))
        return nnx.eval_shape(lambda model: getattr(model, method)(tokens), made).shape

    assert output("__call__", attention) == (1, 9, 32)
    if attention_lib.KERNELS[name].bidirectional:
        bidirectional = dataclasses.replace(attention, causal=False)
        assert output("hidden", bidirectional, name="masked_token") == (1, 9, 16)


def test_power_keeps_a_cache_while_it_is_smaller():
    kernel = KERNELS["power"].kernel("power", form=None)
    assert kernel.cache_policy is kernels.CachePolicy.WHILE_SMALLER
    assert KERNELS["power"].kernel("power", form="attention").cache_policy is kernels.CachePolicy.ALWAYS


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_longest_cache_takes_no_more_bytes_than_the_state(dtype):
    kernel = dataclasses.replace(KERNELS["power"].kernel("power", form=None), dtype=dtype)
    longest, state = kernel.max_cache_length, kernel.init_state(1).nbytes
    assert kernel.init_cache(1, longest).nbytes <= state < kernel.init_cache(1, longest + 1).nbytes


def test_a_state_beyond_memory_has_a_longest_cache(monkeypatch):
    monkeypatch.setattr(target, "memory_bytes", lambda: 2**10)
    assert KERNELS["power"].kernel("power", form=None).max_cache_length == 26


def test_a_row_added_at_run_time(monkeypatch):
    row = attention_lib.Kernel(target="sympow_jax.layers.attention.kernels.softmax:SoftmaxKernel")
    monkeypatch.setitem(attention_lib.KERNELS, "mine", row)
    sizes = {"vocab_size": 8, "layers": 1, "width": 16, "heads": 2}
    layer = layers.make_attention(
        config.ModelConfig(**sizes, attention=config.AttentionConfig(kernel="mine", decay="none")), rngs=0
    )
    assert layer(jnp.zeros((1, 5, 16))).shape == (1, 5, 16)
    with pytest.raises(ValueError, match=r"attention\.kernel is 'other'; it must be one of softmax, power"):
        config.AttentionConfig(kernel="other")
