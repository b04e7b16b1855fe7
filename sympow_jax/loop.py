"""A run in order: trains a config in a workdir, or resumes the run there bit for bit."""

import collections
import contextlib
import pathlib

from pallas_kernels.check import verdict
from sympow_jax import config as config_lib
from sympow_jax import data, evaluation, training
from sympow_jax.process import hosts, signals, workdir
from sympow_jax.training import checkpoint, metrics, restore, sharding, summary, writers

__all__ = ["train"]


def train(config: config_lib.Config, folder: pathlib.Path) -> int:
    """Starts or resumes the run in `folder`; returns the exit code.

    Raises:
      ValueError: Settings, data or folder do not fit each other, or the loss is not finite.
      NotImplementedError: A named implementation does not support the request on these devices.
    """
    # Check data, model and workdir first, so that their errors do not wait for compilation or the end of training.
    with hosts.all_or_none():
        config, contradictions = data.compare_metadata(config)
        for line in contradictions:  # before errors that they explain
            hosts.say(f"warning: {line}", error=True)
        data.require_outside_workdir(config.data, folder)
        rows, heldout, description = data.open_run(
            config.data, config.task, vocab_size=config.model.vocab_size
        )
        evaluation.check_settings(config, heldout)
        writers.check_settings(config)
        mesh = sharding.make_mesh(config)
        share, shares = sharding.batch_share(mesh)
        program = training.Program(config, mesh)
        traced = program.trace(rows.example())
        periodic = evaluation.Periodic(program, heldout)
        batches = rows.batches(config.data.batch_size, share=share, shares=shares)
    workdir.open_workdir(folder, config, description)

    steps, every = config.training.steps, config.training.checkpoint_every

    with contextlib.closing(batches), checkpoint.Checkpoints(folder, config) as checkpoints:
        # Restore before anything is compiled or read, because the position in the data comes with the state.
        state, position = restore.restore_or_begin(program, checkpoints)
        start = int(state.step)
        if start > steps:
            raise ValueError(f"{folder} is at step {start}, past training.steps={steps}; ask for more steps")
        if start < steps:
            # Begin to read now, so that the first batch of a corpus is ready when the update has been compiled.
            batches.set_state(batches.get_state() if position is None else position)

        plan = summary.describe(program, traced, description, folder)
        if heldout.rows is None and (config.data.heldout_paths or config.data.heldout_fraction):
            plan.append(f"warning: nothing is held out, so nothing is evaluated: {heldout.cause_of_absence}")
        hosts.say(*plan)
        advice = verdict.advice(mesh.devices.flat[0])
        if advice and any(x.kernel == "power" and x.implementation is None for x in config.model.attentions):
            hosts.say(advice)
        hosts.say(f"{'training' if start < steps else 'trained'}: step {start} of {steps}")

        with contextlib.ExitStack() as stack:
            reporter = stack.enter_context(
                metrics.Reporter(
                    folder, config, start=start, devices=mesh.devices.flat, writes=hosts.is_first()
                )
            )
            if start < steps:
                update = traced.lower().compile()
                plan.append(summary.memory(program, update, periodic.heldout_means))
                hosts.say(plan[-1])
            workdir.record_plan(folder, plan)
            # Signals end the process at once until here: before the first update there is nothing to save.
            stopping = stack.enter_context(signals.StopSignals())
            number, stop, votes = start, 0, hosts.Vote()
            unreported: collections.deque = collections.deque()
            # In each step: read, update, evaluate, report, agree whether to stop, save, continue prompts.
            for number in range(start + 1, steps + 1):
                with reporter.reading(number):
                    batch = sharding.place_batch(next(batches), mesh)
                state, scalars = update(state, batch)
                # Now, because the state is donated to the next update.
                held_out = periodic.metrics(state) if periodic.is_due(number) else {}
                unreported.append((number, scalars, held_out))
                # Metrics are awaited one update late, so that devices do not wait for the host.
                if len(unreported) > 1:
                    reporter.report(*unreported.popleft())
                checkpoints.check()
                # After that wait, because most signals arrive in it.
                stop = votes.cast(stopping.received or 0, now=number == steps)
                saves = number % every == 0 or number == steps or stop
                has_texts = periodic.has_texts(number)
                if saves or has_texts:
                    # A state is saved, and continues prompts, only once its update is known to be finite.
                    reporter.report(*unreported.popleft())
                if saves:
                    checkpoints.save(number, state, batches.get_state())
                if stop:
                    break
                if has_texts:
                    reporter.write_texts(number, periodic.texts(state))
            # A signal during the last save stops the run too, instead of its evaluation.
            checkpoints.check(wait=True)
            stop = stop or votes.cast(stopping.received or 0, now=True)

    if stop:
        hosts.say(f"stopped after step {number}, which is saved; the same command resumes the run")
        return 128 + stop  # as a shell reports a signal
    written = evaluation.finish(config, folder, heldout)
    hosts.say(*summary.results(folder, written, steps))
    return 0
