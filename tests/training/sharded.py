"""Trains a small model over several devices, for tests: three updates, the collectives of one, or optimizers alone."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sympow_jax import config, models, training
from sympow_jax.training import sharding
from tests import devices
from tests.models import families
from tests.ops import cases
from tests.training import collectives

ROWS, CONTEXT, WINDOW = 8, 64, 8
LOSS_BOUND, GRADIENT_BOUND = 1e-5, 2e-5


def settings(preset: str, arrangement: dict) -> config.Config:
    """Returns a config of a layer of width 64 in float32 on `arrangement`.

    `arrangement` may also set `layers`, `attention_pattern`, `scan_layers`, `remat`, `accumulate` and `task`. Key heads
    are grouped if every axis allows it, and power attention has the form with a state. GPT-2 has its biases and no norm
    after the embedding, and a published family its body.
    """
    sizes = {axis: 1 for axis in ("data", "fsdp", "tensor", "context")} | arrangement
    remat, accumulate = sizes.pop("remat", "none"), sizes.pop("accumulate", 1)
    layers, scan_layers = sizes.pop("layers", 1), sizes.pop("scan_layers", False)
    name = sizes.pop("task", "next_token")
    task = config.TaskConfig(name=name, initial_run="runs/original" if name == "match_attention" else None)
    pattern = tuple(sizes.pop("attention_pattern", ()))
    recurrent = config.preset(preset).kernel != "softmax" and preset != "even_power"
    form = {"form": "chunked", "chunk_size": 16, "exact_window": WINDOW} if recurrent else {}
    if preset in families.FAMILIES:
        body = config.MODEL_SIZES[families.FAMILIES[preset].size]
    else:
        body = {"biases": preset == "gpt2", "embedding_norm": preset != "gpt2"}
    shape = {"vocab_size": 256, "layers": layers, "attention_pattern": pattern, "width": 64, "heads": 8}
    shape |= {"kv_heads": 8 if sizes["tensor"] > 4 else 4, "head_dim": 8, "mlp_width": 256, "remat": remat}
    shape["dtype"] = "float32"
    return config.Config(
        model=config.ModelConfig(**body | shape, attention=config.preset(preset, **form)),
        task=task,
        data=config.DataConfig(context_length=CONTEXT, batch_tokens=ROWS * CONTEXT, packing="documents"),
        # After one update, the state of this optimizer is the gradient.
        optimizer=config.OptimizerConfig(
            name="sgd", learning_rate=0.1 if task.name == "next_token" else 1e-4, accumulate=accumulate
        ),
        training=config.TrainingConfig(scan_layers=scan_layers),
        sharding=config.ShardingConfig(**sizes),
    )


def mesh_of(of: config.Config) -> jax.sharding.Mesh:
    with devices.seen(math.prod(size or 1 for size in dataclasses.asdict(of.sharding).values())):
        return sharding.make_mesh(of)


def batch() -> dict[str, np.ndarray]:
    """Returns rows of several documents, which begin at and within the shards, some followed by padding."""
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, 256, (ROWS, CONTEXT + 1)).astype(np.int32)
    segments = np.zeros((ROWS, CONTEXT), np.int32)
    for row, starts in enumerate(([], [32], [5, 48], [16, 20], [63], [], [1], [40])):
        for start in starts:
            segments[row, start:] += 1
    segments[5, 44:] = -1
    targets = np.where(segments < 0, -1, tokens[:, 1:])
    return {"inputs": tokens[:, :-1], "targets": targets, "segment_ids": segments}


def first_state(program: training.Program) -> training.TrainState:
    """Returns a state whose gradients can be compared.

    Gates are near 0.98, so that a token affects many others, on other devices too. Keys are initialized like queries,
    so that each token's own weight is large. With few keys, all nearly orthogonal to the query, one unit in the last
    place of the kernels would change gradients by 1.6e-5.
    """
    of, state = program.config, program.init_state()
    params = models.unstack(state.params)
    for block in params["blocks"].values():
        attention = block["attention"]
        query = attention["query"]["kernel"]
        by_head = query.reshape(of.model.width, of.model.num_kv_heads, -1, of.model.head_size)
        kernel = by_head[:, :, 0].reshape(of.model.width, -1)
        attention["key"]["kernel"] = jax.device_put(kernel, attention["key"]["kernel"].sharding)
        # RMSNorm has no bias, so that Brumby's gates stay near one half.
        if "decay" in attention and "bias" in block["attention_norm"]:
            norm = block["attention_norm"]["bias"]
            block["attention_norm"]["bias"] = jnp.ones_like(norm)
            attention["decay"]["kernel"] += 4 / of.model.width
    params = jax.device_put(models.stack(params, of.model.attention_period), program.shardings.params)
    return dataclasses.replace(state, params=params)


def train(of: config.Config, mesh: jax.sharding.Mesh) -> tuple[list[float], list[np.ndarray]]:
    program = training.Program(of, mesh)
    state = first_state(program)
    placed = sharding.place_batch(batch(), mesh)
    losses, gradients = [], []
    for _ in range(3):
        state, metrics = program.update(state, placed)
        losses.append(float(metrics["loss"]))
        # Copied: the state is donated to the next update.
        gradients = gradients or [np.array(x) for x in jax.tree.leaves(state.opt_state) if x.ndim]
    losses.append(float(program.heldout_means(state.params, state.statistics, placed)["loss"]))
    return losses, gradients


def check(preset: str, arrangements: list[dict]) -> None:
    """Checks that each sharding layout trains as one device does.

    Errors of losses are relative, that of gradients is of the worst parameter.
    """
    expected = {}
    for arrangement in arrangements:
        of = settings(preset, arrangement)
        if of.model.num_kv_heads not in expected:
            one = dataclasses.replace(
                of,
                model=dataclasses.replace(of.model, remat="none"),
                training=config.TrainingConfig(scan_layers=False),
                sharding=config.ShardingConfig(),
                optimizer=dataclasses.replace(of.optimizer, accumulate=1),
            )
            expected[of.model.num_kv_heads] = train(one, mesh_of(one))
        losses, gradients = train(of, mesh_of(of))
        wanted, wanted_gradients = expected[of.model.num_kv_heads]
        np.testing.assert_allclose(losses, wanted, rtol=LOSS_BOUND, err_msg=str(arrangement))
        # A bias of the keys does not change softmax, so its gradient is only rounding.
        natural = max(float(np.sqrt(np.mean(np.square(x)))) for x in wanted_gradients)
        for found, other in zip(gradients, wanted_gradients, strict=True):
            assert cases.error(found, other, natural) <= GRADIENT_BOUND, arrangement
        assert losses[2] < losses[0], arrangement


def exchanged(preset: str, arrangement: dict) -> list[collectives.Collective]:
    of = settings(preset, arrangement)
    mesh = mesh_of(of)
    shapes = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding.batch_sharding(mesh))
        for name, x in batch().items()
    }
    program = training.Program(of, mesh)
    compiled = program.update.lower(program.abstract, shapes).compile()
    return collectives.collectives(compiled.as_text(), mesh)


def check_optimizer(preset: str, arrangement: dict, name: str) -> None:
    """Checks the parameters after two updates of an optimizer, with random gradients, so that it alone is compiled."""
    decay = {} if name == "adam" else {"weight_decay": 0.1}
    made = config.OptimizerConfig(name=name, learning_rate=0.01, clip_norm=1.0, **decay)
    assert _difference(preset, arrangement, made, _updated) <= GRADIENT_BOUND


def check_program(preset: str, arrangement: dict) -> None:
    """Checks the parameters after two updates of a program with a z-loss and a moving average."""
    made = config.OptimizerConfig(name="sgd", learning_rate=0.1, z_loss=0.1, ema_decay=0.5)
    assert _difference(preset, arrangement, made, _trained) <= GRADIENT_BOUND


def _difference(preset: str, arrangement: dict, optimizer: config.OptimizerConfig, update) -> float:
    """Returns the worst relative difference of a parameter between the devices of an arrangement and one."""
    many = dataclasses.replace(settings(preset, arrangement), optimizer=optimizer)
    one = dataclasses.replace(many, sharding=config.ShardingConfig())
    found = update(training.Program(many, mesh_of(many)))
    expected = update(training.Program(one, mesh_of(one)))
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return max(cases.error(np.asarray(a), np.asarray(b), 0.01) for a, b in pairs)


def _updated(program: training.Program):
    generator = np.random.default_rng(0)

    def draw():
        arrays = jax.tree.map(
            lambda x: generator.normal(size=x.shape).astype(x.dtype), program.abstract.params
        )
        return jax.device_put(arrays, jax.tree.map(lambda x: x.sharding, program.abstract.params))

    def update(params, opt_state, grads):
        changes, opt_state = program.optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, changes), opt_state

    shardings = jax.tree.map(lambda x: x.sharding, (program.abstract.params, program.abstract.opt_state))
    update = jax.jit(update, out_shardings=shardings)
    params = draw()
    opt_state = jax.jit(program.optimizer.init, out_shardings=shardings[1])(params)
    for _ in range(2):
        params, opt_state = update(params, opt_state, draw())
    return params


def _trained(program: training.Program):
    state, placed = program.init_state(), sharding.place_batch(batch(), program.mesh)
    for _ in range(2):
        state, metrics = program.update(state, placed)
    return state.params, state.average, metrics["z_loss"]
