"""Tests of new attention that is trained to give the outputs of the attention that it replaces."""

import dataclasses
import json
import pathlib
import re
import shutil

import jax
import numpy as np
import pytest
from flax import nnx

from sympow_jax import commands, config, layers, loop, models, tasks, training
from sympow_jax.evaluation import by_task
from sympow_jax.inspection import inspect
from sympow_jax.layers import mlp
from sympow_jax.tasks import flops
from sympow_jax.training import restore, sharding, summary
from tests.models import families
from tests.training import small

PATTERN = ("conformal_paper", "shared")
TIME = 24


def settings(**changes) -> config.Config:
    """Returns a run of the body of Qwen3 whose first and third layer of four are replaced."""
    base = families.settings("qwen3", layers=4, attention_pattern=PATTERN)
    run = config.Config(
        model=dataclasses.replace(
            base, attention=dataclasses.replace(base.attention, exact_window=4, decay_bias=4.0)
        ),
        task=config.TaskConfig(name="match_attention", initial_run="runs/original"),
        data=config.DataConfig(context_length=TIME, batch_tokens=2 * TIME),
        optimizer=config.OptimizerConfig(name="adamw", learning_rate=3e-3, weight_decay=0.1),
        training=config.TrainingConfig(scan_layers=False),
    )
    return dataclasses.replace(run, **changes)


def tokens():
    return np.random.default_rng(0).integers(0, families.VOCABULARY, (2, TIME)).astype(np.int32)


def batch(**more):
    return {"inputs": tokens(), "targets": np.roll(tokens(), -1, axis=1), **more}


def test_errors_are_those_of_new_layers_on_hidden_states_of_the_original_and_train_these_alone():
    run = settings()
    model = models.make(
        dataclasses.replace(run.model, layers=2, attention_pattern=("conformal_paper",)), run.task, rngs=1
    )
    generator = np.random.default_rng(0)
    noisy = jax.tree.map(
        lambda x: np.asarray(x + 0.3 * generator.normal(size=x.shape), x.dtype), nnx.state(model)
    )
    nnx.update(model, noisy)
    segment_ids = np.zeros((2, TIME), np.int32)
    segment_ids[1, 10:] = 1
    segment_ids[1, 20:] = -1

    @nnx.jit
    def outputs(model, decoder):
        x, _ = decoder._stem(decoder.embed(tokens()), segment_ids)
        result = []
        for block, matched in zip(decoder.blocks, model.blocks):
            normed = layers.normalize(block.attention_norm, x, segment_ids)
            both = block.attention, matched.attention
            result.append([attention(normed, segment_ids=segment_ids) for attention in both])
            x = block(x, segment_ids=segment_ids)
        return result

    @nnx.jit
    def errors_and_gradients(model):
        def total(model):
            errors = model.errors(tokens(), segment_ids=segment_ids)
            return errors.sum(), errors

        return nnx.grad(total, has_aux=True)(model)

    grads, found = errors_and_gradients(model)
    counts, expected = segment_ids >= 0, []
    for old, new in outputs(model, _original(model)):
        old, new = np.asarray(old, np.float64), np.asarray(new, np.float64)
        expected.append(((new - old) ** 2).sum(-1) / (old**2).sum(-1)[counts].mean())
    expected = np.stack(expected, axis=-1)
    np.testing.assert_allclose(np.asarray(found)[counts], expected[counts], rtol=1e-4)
    assert expected[counts].min() > 1e-3
    for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(grads)):
        name = models.parameter_name(path)
        new = name.startswith(("blocks.0.attention.", "blocks.1.attention."))
        assert bool(np.abs(leaf).max() > 0) == new, name
        assert models.AttentionMatcher.is_trained(model.config, name) == new


def _original(matcher):
    decoder = models.DecoderLM(dataclasses.replace(matcher.config, attention_pattern=()), rngs=0)
    for name in ("embedding", "unembedding", "final_norm"):
        setattr(decoder, name, getattr(matcher, name))
    for block, matched in zip(decoder.blocks, matcher.blocks):
        block.attention = matched.original
        for name in ("attention_norm", "mlp_norm", "mlp"):
            setattr(block, name, getattr(matched, name))
    return decoder


@pytest.mark.parametrize("scan_layers", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_retrofit_in_two_stages(tmp_path, capsys, scan_layers):
    """The first begins with the layers of the original and trains new attention alone; the second begins with that."""

    def program(**changes):
        steps = config.TrainingConfig(scan_layers=scan_layers)
        return training.Program(settings(training=steps, **changes), sharding.whole_mesh())

    model = settings().model
    # The window is that of the new attention, since the old has none.
    attention = dataclasses.replace(model.attention, window=model.attention.window + 1)
    original = dataclasses.replace(model, attention=attention, attention_pattern=())
    base = program(model=original, task=config.TaskConfig())
    state = base.init_state()
    old = models.unstack(jax.tree.map(np.asarray, state.params))
    small.save(tmp_path / "base", base.config, state)
    first = program(task=config.TaskConfig(name="match_attention", initial_run=str(tmp_path / "base")))
    state, errors = restore.begin(first), []
    before = models.unstack(jax.tree.map(np.asarray, state.params))
    jax.tree.map(
        np.testing.assert_array_equal, before["blocks"][2]["original"], old["blocks"][2]["attention"]
    )
    jax.tree.map(np.testing.assert_array_equal, before["blocks"][1], old["blocks"][1])
    for _ in range(8):
        state, metrics = first.update(state, batch())
        errors.append(float(metrics["loss"]))
        layers = [float(metrics[f"loss_layer_{layer}"]) for layer in (0, 2)]
        assert np.mean(layers) == pytest.approx(errors[-1], rel=1e-5)
    assert errors[-1] < 0.9 * errors[0]
    small.save(tmp_path / "first", first.config, state, step=8)
    after, trained = models.unstack(restore.restore_arrays(first, tmp_path / "first")[0]["params"]), 0
    jax.tree.map(np.testing.assert_array_equal, after, models.unstack(state.params))
    pairs = zip(jax.tree_util.tree_leaves_with_path(after), jax.tree.leaves(before), strict=True)
    for (path, leaf), start in pairs:
        is_trained = models.AttentionMatcher.is_trained(first.config.model, models.parameter_name(path))
        assert np.array_equal(leaf, start) != is_trained, path
        trained += is_trained * leaf.size
    assert sum(leaf.size for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim) == 2 * trained
    capsys.readouterr()
    second = program(task=config.TaskConfig(initial_run=str(tmp_path / "first")))
    begun = models.unstack(restore.begin(second).params)
    assert "dropped: blocks.*.original.key.kernel" in capsys.readouterr().out
    begun, after = ({i: x["blocks"][i]["attention"] for i in range(4)} for x in (begun, after))
    jax.tree.map(np.testing.assert_array_equal, begun, after)


@pytest.mark.slow
def test_runs_of_a_retrofit_need_their_initial_run_only_to_begin(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shape = dataclasses.replace(settings().model, attention_pattern=(), vocab_size=256, layers=1)
    base = settings(
        model=shape,
        task=config.TaskConfig(),
        data=config.DataConfig(source="text", context_length=TIME, batch_tokens=2 * TIME),
        training=config.TrainingConfig(steps=1),
        evaluation=config.EvaluationConfig(context_lengths=(), every=0),
    )
    assert loop.train(base, pathlib.Path("base")) == 0

    def run(spec, folder, steps=1):
        options = [f"--workdir={folder}", f"--config.training.steps={steps}"]
        options += ["--config.evaluation.context_lengths=()"]
        return commands.run("train", [f"--config={spec}", *options], program="train.py")

    assert run("retrofit:base,preset=sympow_gated,match=true", "first") == 0
    assert run("retrofit:first", "second") == 0
    shutil.rmtree("base")
    assert run("first/config.json", "first") == 0
    pathlib.Path("first").rename("moved")
    assert run("second/config.json", "second", steps=2) == 0
    assert commands.run("eval", ["--workdir=second", "--context_lengths=24"], program="eval.py") == 0
    asked = ["--workdir=second", "--prompt=def", "--max_tokens=4"]
    assert commands.run("generate", asked, program="generate.py") == 0
    exported = ["export", "--workdir=second", "--out=second.safetensors"]
    assert commands.run("weights", exported, program="sympow weights") == 0
    capsys.readouterr()
    for spec, folder, message in (
        ("retrofit:first", "second", "first is not the workdir of a run; make .* or resume .*config.json"),
        ("second/config.json", "new", "task.initial_run: first is not the workdir of a run: it"),
        ("retrofit:moved", "second", "task.initial_run was 'first' and is 'moved'"),
    ):
        with pytest.raises(SystemExit):
            run(spec, folder, steps=3)
        (line,) = capsys.readouterr().err.splitlines()
        assert re.search(message, line)


def test_flops_are_a_forward_pass_of_the_original_and_both_of_the_new_layers():
    """Relative to a run of next tokens with nothing to unembed, whose passes count three times."""

    def counted(pattern, task="next_token"):
        model = dataclasses.replace(settings().model, attention_pattern=pattern, vocab_size=1)
        if task == "next_token":
            return flops.model_flops_per_token(model, TIME)
        run = dataclasses.replace(
            settings(task=config.TaskConfig(name=task, initial_run="runs/original")), model=model
        )
        assert run.data.context_length == TIME
        return tasks.make(run).flops_per_token()

    unembedding = 6 * settings().model.width
    original, new = (counted(pattern) - unembedding for pattern in ((), ("conformal_paper",)))
    mlp_flops = 6 * 4 * mlp.num_weights(settings().model)
    expected = original / 3 + (new - mlp_flops) / 2  # two of four layers are new
    assert counted(PATTERN, "match_attention") == pytest.approx(expected)


def test_a_terminal_shows_the_worst_layer_alone():
    metrics = {"loss": 0.375, "loss_layer_0": 0.25, "loss_layer_2": 0.5}
    assert tasks.make(settings()).shown(metrics) == {"loss": 0.375, "worst loss_layer_2": 0.5}


def test_a_first_stage_is_neither_inspected_nor_evaluated(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(settings())))
    with pytest.raises(ValueError, match=r"the first stage of a retrofit.*inspect the run that starts"):
        inspect.inspect(tmp_path, b"fox")
    with pytest.raises(ValueError, match=r"the first stage of a retrofit; evaluate the run that starts"):
        by_task.evaluate([tmp_path], out=tmp_path)
    printed = summary.next_command(settings(), tmp_path, "sympow train")
    assert printed == f"next: sympow train --config=retrofit:{tmp_path} --workdir=NEW"


def test_an_original_of_other_attention_is_not_matched(tmp_path):
    """Else the new layers would learn the outputs of a function that nobody has trained."""
    run = settings(task=config.TaskConfig(name="match_attention", initial_run=str(tmp_path)))
    (tmp_path / "checkpoints" / "1").mkdir(parents=True)
    for changes, message in (
        ({"qk_norm": False}, "model.attention.qk_norm was False and is True"),
        ({"power": 4, "form": "chunked"}, "model.attention.power was 4 and is 2"),
    ):
        other = dataclasses.replace(run.model.attention, decay_bias=None, **changes)
        model = dataclasses.replace(run.model, attention=other, attention_pattern=())
        found = dataclasses.replace(run, model=model, task=config.TaskConfig())
        (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(found)))
        with pytest.raises(ValueError, match=message):
            restore.read_initial_config(tmp_path, tasks.make(run))
    hybrid = dataclasses.replace(run.model, attention_pattern=("softmax", "conformal_paper"))
    found = dataclasses.replace(run, model=hybrid, task=config.TaskConfig())
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(found)))
    with pytest.raises(ValueError, match="has layers of different attention"):
        restore.read_initial_config(tmp_path, tasks.make(run))


def test_positions_that_the_original_does_not_add():
    sizes = {"vocab_size": 8, "layers": 2, "width": 32, "heads": 2}
    model = config.ModelConfig(**sizes, attention=config.preset("gpt2"), attention_pattern=("sympow",))
    with pytest.raises(ValueError, match="adds positions None to the embedding where the original adds"):
        settings(model=model)
    kept = dataclasses.replace(model, attention_pattern=("sympow", "shared"))
    assert settings(model=kept).model.longest_document == 1024


def test_mistakes():
    for changes, message in (
        ({"attention_pattern": ()}, "every layer has model.attention; name the new one"),
        ({"attention_pattern": ("shared",)}, "every layer has model.attention"),
    ):
        with pytest.raises(ValueError, match=message):
            settings(model=dataclasses.replace(settings().model, **changes))
    with pytest.raises(ValueError, match=r"task.initial_run none; name the run whose attention is replaced"):
        settings(task=config.TaskConfig(name="match_attention"))
