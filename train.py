"""Train a model: `uv run train.py --config=configs/quickstart.py --workdir=runs/quickstart`.

The same command again resumes the run in the workdir, to the bit.
"""

import pathlib
import sys
from collections.abc import Sequence

import grain

from sympow_jax import config, data, evaluation
from sympow_jax.training import checkpoint, cli, flags, metrics, sharding, step, workdir

# Batches read ahead of the step under way.
PREFETCH = 4


def train(settings: config.Config, folder: pathlib.Path) -> int:
    """Trains, or goes on training, the run in `folder`; returns the exit code.

    Raises:
      ValueError: settings, data or folder do not fit each other, or the loss is not finite.
      NotImplementedError: a named implementation cannot do it on these devices.
    """
    # Data, model and workdir first: their errors should not wait for a compilation, nor for the end of training.
    rows = data.train_dataset(settings.data, vocab_size=settings.model.vocab_size)
    evaluation.check_settings(settings)
    metrics.check_settings(settings)
    mesh = sharding.make_mesh(settings)
    step.check_model(settings, mesh)
    workdir.open_workdir(folder, settings)
    workdir.record_data(folder, data.describe(settings.data))
    reading = grain.ReadOptions(num_threads=1, prefetch_buffer_size=PREFETCH)
    batches = iter(data.batches(rows, settings.data.batch_size).to_iter_dataset(reading))

    abstract = step.abstract_state(settings, mesh)
    update = step.make_update(settings, mesh)
    steps, every = settings.training.steps, settings.training.checkpoint_every

    with checkpoint.Checkpoints(folder, settings) as checkpoints:
        restored = checkpoints.restore(abstract)
        if restored is None:
            state = step.init_state(settings, mesh)
        else:
            state, position = restored
            batches.set_state(position)
        start = int(state.step)
        if start > steps:
            raise ValueError(f"{folder} is at step {start}, past training.steps={steps}; ask for more steps")
        print(sharding.describe(mesh, abstract), flush=True)
        print(
            f"{'training' if start < steps else 'trained'}: step {start} of {steps} in {folder}", flush=True
        )

        with (
            metrics.Reporter(folder, settings, start=start, devices=mesh.devices.flat) as reporter,
            cli.StopSignals() as stop,
        ):
            pending = None  # the update whose metrics are not on the host yet
            for number in range(start + 1, steps + 1):
                with reporter.reading(number):
                    batch = sharding.place_batch(next(batches), mesh)
                state, scalars = update(state, batch)
                if pending:
                    reporter.report(*pending)
                pending = (number, scalars)
                if number % every == 0 or number == steps or stop.received:
                    # A state is saved only once its update is known to be finite.
                    reporter.report(*pending)
                    pending = None
                    checkpoints.save(number, state, batches.get_state())
                if stop.received:
                    break

    if stop.received:
        print(f"stopped after step {number}, which is saved; the same command again goes on", flush=True)
        return stop.exit_code
    if settings.evaluation.context_lengths:
        evaluation.evaluate_runs([folder], settings.evaluation.context_lengths, out=folder)
    return 0


def main(arguments: Sequence[str]) -> int:
    """Runs the program with the arguments after its name; returns the exit code."""
    with cli.user_errors():
        return train(*flags.parse(arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
