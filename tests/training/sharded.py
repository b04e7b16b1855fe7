"""Trains a small model over simulated devices, for tests: three updates, or the collectives of one.

    python -m tests.training.sharded train PRESET '{"data": 2, "context": 4}' ...
    python -m tests.training.sharded collectives PRESET '{...}'

Prints a line of JSON for each sharding layout. Runs in a separate process, since it needs more devices than the other
tests have.
"""

import dataclasses
import json
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np

from sympow_jax import config, training
from sympow_jax.training import sharding
from tests.models import families
from tests.ops import cases
from tests.training import collectives

ROWS, CONTEXT, WINDOW = 8, 64, 8


def settings(preset: str, arrangement: dict) -> config.Config:
    """Returns a config of a layer of width 64 in float32 on `arrangement`.

    `arrangement` may also set `layers`, `attention_pattern`, `scan_layers`, `remat`, `accumulate` and `task`. Key heads
    are grouped if every axis allows it, and power attention has the form with a state. GPT-2 has its biases and no norm
    after the embedding, and a published family its body.
    """
    sizes = {axis: 1 for axis in ("data", "fsdp", "tensor", "context")} | arrangement
    remat, accumulate = sizes.pop("remat", "none"), sizes.pop("accumulate", 1)
    layers, scan_layers = sizes.pop("layers", 1), sizes.pop("scan_layers", False)
    task = config.TaskConfig(name=sizes.pop("task", "next_token"))
    pattern = tuple(sizes.pop("attention_pattern", ()))
    recurrent = config.preset(preset).kernel != "softmax" and preset != "even_power"
    form = {"form": "chunked", "chunk_size": 16, "exact_window": WINDOW} if recurrent else {}
    if preset in families.FAMILIES:
        body = config.MODEL_SIZES[families.FAMILIES[preset].size]
    else:
        body = {"biases": preset == "gpt2", "embedding_norm": preset != "gpt2"}
    shape = {
        "vocab_size": 256,
        "layers": layers,
        "attention_pattern": pattern,
        "width": 64,
        "heads": 8,
        "kv_heads": 8 if sizes["tensor"] > 4 else 4,
        "head_dim": 8,
        "mlp_width": 256,
        "dtype": "float32",
        "remat": remat,
    }
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
    of, state = program.config, program.by_layer(program.init_state())
    for block in state.params["blocks"].values():
        attention = block["attention"]
        query = attention["query"]["kernel"]
        by_head = query.reshape(of.model.width, of.model.kv_heads, -1, of.model.head_dim)
        kernel = by_head[:, :, 0].reshape(of.model.width, -1)
        attention["key"]["kernel"] = jax.device_put(kernel, attention["key"]["kernel"].sharding)
        # RMSNorm has no bias, so that Brumby's gates stay near one half.
        if "decay" in attention and "bias" in block["attention_norm"]:
            norm = block["attention_norm"]["bias"]
            block["attention_norm"]["bias"] = jnp.ones_like(norm)
            attention["decay"]["kernel"] += 4 / of.model.width
    return program.from_layers(state)


def train(of: config.Config, mesh: jax.sharding.Mesh) -> tuple[list[float], list[np.ndarray]]:
    """Returns the losses of three updates, the held-out loss, and the gradients of the first update."""
    program = training.Program(of, mesh)
    state = first_state(program)
    placed = sharding.place_batch(batch(), mesh)
    losses, gradients = [], []
    for _ in range(3):
        state, metrics = program.update(state, placed)
        losses.append(float(metrics["loss"]))
        # Copied: the state is donated to the next update.
        by_layer = program.by_layer(state).opt_state
        gradients = gradients or [np.array(x) for x in jax.tree.leaves(by_layer) if x.ndim]
    losses.append(float(program.heldout_means(state.params, state.statistics, placed)["loss"]))
    return losses, gradients


def compare(preset: str, arrangements: list[dict]) -> None:
    """Prints the difference of each sharding layout from one device.

    For losses it is relative, for gradients that of the worst parameter.
    """
    expected = {}
    for arrangement in arrangements:
        of = settings(preset, arrangement)
        if of.model.kv_heads not in expected:
            one = dataclasses.replace(
                of,
                training=config.TrainingConfig(scan_layers=False),
                sharding=config.ShardingConfig(),
                optimizer=_whole(of.optimizer),
            )
            one = dataclasses.replace(one, model=dataclasses.replace(of.model, remat="none"))
            expected[of.model.kv_heads] = train(one, sharding.whole_mesh(jax.devices()[:1]))
        losses, gradients = train(of, sharding.make_mesh(of))
        wanted, wanted_gradients = expected[of.model.kv_heads]
        # A bias of the keys does not change softmax, so its gradient is only rounding.
        natural = max(float(np.sqrt(np.mean(np.square(x)))) for x in wanted_gradients)
        print(
            json.dumps(
                {
                    "loss": max(abs(a / b - 1) for a, b in zip(losses, wanted, strict=True)),
                    "gradient": max(
                        cases.error(found, other, natural)
                        for found, other in zip(gradients, wanted_gradients)
                    ),
                    "falls": losses[2] < losses[0],
                }
            ),
            flush=True,
        )


def _whole(optimizer: config.OptimizerConfig) -> config.OptimizerConfig:
    return dataclasses.replace(optimizer, accumulate=1)


def exchanged(preset: str, arrangements: list[dict]) -> None:
    """Prints the collectives of an update."""
    for arrangement in arrangements:
        of = settings(preset, arrangement)
        mesh = sharding.make_mesh(of)
        shapes = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding.batch_sharding(mesh))
            for name, x in batch().items()
        }
        program = training.Program(of, mesh)
        compiled = program.update.lower(program.abstract, shapes).compile()
        found = collectives.collectives(compiled.as_text(), mesh)
        print(json.dumps([dataclasses.astuple(x) for x in found]), flush=True)


if __name__ == "__main__":
    chosen = [json.loads(text) for text in sys.argv[3:]]
    names = ("data", "fsdp", "tensor", "context")
    jax.config.update("jax_num_cpu_devices", max(math.prod(x.get(name, 1) for name in names) for x in chosen))
    {"train": compare, "collectives": exchanged}[sys.argv[1]](sys.argv[2], chosen)
