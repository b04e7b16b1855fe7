"""Exports weights of runs and imports weights as runs.

    sympow weights export --workdir=runs/quickstart --out=quickstart.safetensors
    sympow weights import --weights=Qwen3-0.6B/ --workdir=runs/qwen3
    sympow weights import --weights=SmolLM2-135M.gguf --workdir=runs/smollm2
    sympow weights export --workdir=runs/qwen3 --format=huggingface --out=qwen3/

An import is a run at step 0. `sympow eval` and `sympow generate` can read it, `sympow train` can resume it, and other
runs can start from it with task.initial_run.
"""

import pathlib
import shlex
from collections.abc import Sequence

from sympow_jax import config, hub
from sympow_jax.commands import command_line
from sympow_jax.process import signals, streams, workdir
from sympow_jax.training import summary
from sympow_jax.weights import families, files, pretrained, runs


def main(arguments: Sequence[str], program: str = "sympow weights") -> int:
    """Runs the program with the arguments after its name; returns the exit code."""
    parser = command_line.Parser(prog=program, description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="export|import")
    exporting = commands.add_parser("export", help="Write a run's newest checkpoint as safetensors.")
    exporting.add_workdir()
    exporting.add_options(
        (
            *("format", runs.FORMATS, None, runs.FORMATS[0]),
            "`sympow` is a file and its settings; `huggingface` is a folder that transformers opens, for models of a "
            "family that it has.",
        ),
        (
            *("out", str, "FILE.safetensors|FOLDER", ...),
            "File to write, whose settings go to FILE.json, or the folder of --format=huggingface.",
        ),
        ("dtype", files.DTYPES, None, files.DTYPES[0], "Dtype of the file; float32 loses nothing."),
    )
    importing = commands.add_parser(
        "import",
        help="Make a new workdir from safetensors or a GGUF file.",
        epilog="Settings are changed with --config.GROUP.NAME=VALUE, as in training. `sympow train --help` lists them.",
    )
    importing.add_options(
        (
            *("weights", str, "FILE.safetensors|FOLDER|hf://ORG/NAME|FILE.gguf", ...),
            "File or folder that `export` wrote, a published transformer in Hugging Face's layout, the name of one to "
            "download (hf://ORG/NAME@REVISION for a revision of it), or one in a GGUF file.",
        ),
        ("workdir", str, "DIR", ..., "Workdir to make."),
        (
            *("config", str, "FILE.json|CONFIG[:ARGUMENTS]", None),
            "Settings of the run: the JSON that `export` wrote, a published config.json, or a config as for training, "
            "NAME or FILE.py. Default: the JSON next to the weights, or the metadata of a GGUF file.",
        ),
    )
    importing.add_settings(hidden=True)
    with signals.user_errors():
        known = parser.parse_args(arguments)
        if known.command == "export":
            number, count = runs.export_run(known.workdir, known.out, format=known.format, dtype=known.dtype)
            streams.say(f"{known.out} has the {count:,} numbers of step {number} of {known.workdir}")
            if known.format == "huggingface" and not pretrained.companions(known.out):
                streams.say(
                    f"{known.out} has no tokenizer, because {known.workdir} has none to copy; add its files, and set "
                    f"max_position_embeddings, bos_token_id and pad_token_id in config.json"
                )
        else:
            workdir.require_path("--workdir", known.workdir)
            path = hub.local_path(known.weights, hub.WEIGHTS)
            if not path.exists():
                raise ValueError(f"--weights={known.weights}: there is no such file or folder")
            given = known.config
            # A JSON file has a suffix, which the names of configs do not have.
            if given is not None and pathlib.Path(given.partition(":")[0]).suffix in ("", ".py"):
                settings = config.load(given)
            else:
                settings = files.read_settings(files.settings_path(path) if given is None else given)
            settings = config.override(settings, command_line.changed_settings(known))
            count = runs.import_run(path, settings, known.workdir)
            streams.say(f"{known.workdir} is a run at step 0 with the {count:,} numbers of {path}")
            settings = workdir.read_config(pathlib.Path(known.workdir))
            streams.say(summary.next_command(settings, pathlib.Path(known.workdir), program))
            if settings.data.paths == (families.TOKENS,):
                streams.say(
                    f"next: sympow eval --workdir={shlex.quote(known.workdir)} --config.data.source=tokens "
                    f"--config.data.paths=FILES",
                    f"data.paths of its config, {families.TOKENS}, is a placeholder; name files that `sympow prepare` "
                    f"made with the model's tokenizer",
                )
    return 0
