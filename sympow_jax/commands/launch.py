"""Trains a model: `sympow train --config=quickstart --workdir=runs/quickstart`.

Running the same command again resumes the run in the workdir, bit for bit.
"""

from collections.abc import Sequence

import jax

from pallas_kernels.check import verdict
from sympow_jax.commands import command_line
from sympow_jax.process import compile_cache, hosts, signals


def main(arguments: Sequence[str], program: str = "sympow train") -> int:
    """Runs the program with the arguments after its name; returns the exit code."""
    with hosts.ending(), signals.user_errors():
        config, folder, launch = command_line.parse_training(arguments, program)
        compile_cache.cache_programs()
        # Imported only now, because they take seconds, for which a mistake in the command line should not wait.
        from sympow_jax import loop
        from sympow_jax.process import workdir
        from sympow_jax.training import summary

        hosts.join(launch)
        if jax.process_count() > 1:
            # Use only kernels that every process has verified, so that all compile the same program.
            verdict.agree(jax.devices()[0].device_kind)
        code = loop.train(config, folder)
        if code == 0:
            hosts.say(summary.next_command(workdir.read_config(folder), folder, program))
        return code
