"""Trains the 124M model on text at hand for a fixed time, and evaluates it beyond its training context.

    python -m benchmarks.hopper.text [--preset=NAME ...] [--seconds=N] [--text=FOLDER] [--out=FILE]

The text is the source code of the installed Python packages, or of FOLDER: files ending in .py, .md, .txt or .rst, in
the order of their paths, as one stream of bytes. A tenth of the subfolders is held out. Batches are random windows of
the stream, in a plain loop without grain, so that no other package is needed. The learning rate is constant after a
warmup. A row has the loss every few steps, so that presets can be compared after equal steps too, and the mean held-out
loss by position.
"""

import dataclasses
import pathlib
import sysconfig
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

import benchmarks.training
from benchmarks import _rows
from sympow_jax import config, models, training
from sympow_jax.evaluation import buckets, scores
from sympow_jax.training import sharding

PRESETS = ("conformal", "softmax", "sympow_gated", "sympow")
CONTEXT, TOKENS = 16_384, 65_536
LENGTHS = tuple(2**n for n in range(8, 17))
DOCUMENTS = 16
SMOKE: dict[str, Any] = {"context": 64, "tokens": 256, "lengths": [64, 128], "documents": 2, "tiny": True}
SUFFIXES = (".py", ".md", ".txt", ".rst")
# Bytes read at most, and the subfolders held out: one in HELDOUT.
MOST_BYTES, HELDOUT = 400 * 2**20, 10
WARMUP_STEPS = 50
# Steps between two losses of a row.
EVERY = 10
# To compile and evaluate, in addition to the seconds of training.
OVERHEAD_SECONDS = 180.0


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table and writes the JSON. Exits with status 1 and one line if there is no GPU."""
    parser = _rows.make_parser(__doc__)
    parser.add_argument("--preset", action="append", choices=tuple(config.PRESETS), help="may be given again")
    parser.add_argument("--seconds", type=float, default=60.0, help="time of the steps of each preset")
    parser.add_argument(
        "--text", type=pathlib.Path, help="folder of the text; the installed packages if none"
    )
    options = _rows.read_options(parser, arguments)
    if options.row:
        _rows.print_result(measure, options.row)
        return
    sizes: dict[str, Any] = {
        "context": CONTEXT,
        "tokens": TOKENS,
        "lengths": list(LENGTHS),
        "documents": DOCUMENTS,
    }
    common = (SMOKE if options.smoke else sizes) | {"seconds": options.seconds}
    common["text"] = str(options.text) if options.text else None
    described = [{"preset": preset, **common} for preset in options.preset or PRESETS]
    report = _rows.make_report(
        "benchmarks.hopper.text",
        described,
        measure,
        options,
        seconds=options.seconds + OVERHEAD_SECONDS,
    )
    lengths = common["lengths"]
    columns = ("preset", "steps", "tokens/s", "training loss", *(f"{length:,}" for length in lengths))
    table = _rows.make_table("held-out loss by position", (*columns, "note"), ("preset", "note"))
    for row in report["rows"]:
        cells = ["-"] * (len(columns) - 1)
        if "steps" in row:
            cells = [f"{row['steps']:,}", f"{row['tokens_per_second']:,.0f}", f"{row['losses'][-1]:.3f}"]
            cells += [f"{loss:.3f}" for loss in row["heldout"].values()]
        table.add_row(row["preset"], *cells, row.get("note", ""))
    _rows.print_tables(report, [table])


def measure(row: dict) -> dict:
    """Trains a preset for `seconds` and returns its losses.

    The time starts after the first step, which compiles. Raises ValueError if the text is too short.
    """
    installed = [sysconfig.get_paths()[name] for name in ("stdlib", "purelib")]
    folders = [pathlib.Path(folder) for folder in ([row["text"]] if row["text"] else installed)]
    train, heldout = read_text(folders)
    longest = row["lengths"][-1]
    for side, text, needed in (("training", train, row["context"] + 1), ("held-out", heldout, longest)):
        if len(text) < needed:
            raise ValueError(
                f"the {side} text has {len(text):,} bytes and needs {needed:,}: name a folder with more text, of which "
                f"one subfolder in {HELDOUT} is held out"
            )
    # Evenly spaced windows without overlap.
    windows = len(heldout) // longest
    count = min(row["documents"], windows)
    starts = np.arange(count) * windows // count * longest
    documents = np.stack([heldout[start : start + longest] for start in starts]).astype(np.int32)
    settings = config.load(f"gpt2_124m:{row['preset']}")
    sizes = (benchmarks.training.TINY if row.get("tiny") else {}) | {"vocab_size": 256}
    settings = dataclasses.replace(
        settings,
        model=dataclasses.replace(settings.model, **sizes),
        data=dataclasses.replace(settings.data, context_length=row["context"], batch_tokens=row["tokens"]),
        optimizer=dataclasses.replace(settings.optimizer, warmup_steps=WARMUP_STEPS),
    )
    batches = _batches(train, row["context"], settings.data.batch_size)
    mesh = sharding.whole_mesh(jax.devices()[:1])
    program = training.Program(settings, mesh)
    state = program.init_state()
    state, metrics = program.update(state, sharding.place_batch(next(batches), mesh))
    losses, steps = [float(metrics["loss"])], 1
    begin = time.perf_counter()
    while (elapsed := time.perf_counter() - begin) < row["seconds"]:
        # To the next multiple of EVERY.
        for _ in range(EVERY - steps % EVERY):
            state, metrics = program.update(state, sharding.place_batch(next(batches), mesh))
            steps += 1
        # Wait for the device, so that the host does not enqueue more steps than there is time for.
        losses.append(float(metrics["loss"]))
    model = program.model(state)
    assert isinstance(model, models.DecoderLM)
    per_token = scores.token_losses(model, documents)
    means = buckets.bucket_means(per_token, row["lengths"], first_position=2)
    return {
        "steps": steps,
        "tokens_per_second": (steps - 1) * row["tokens"] / elapsed,
        "every": EVERY,
        "losses": losses,
        "heldout": {str(bucket.context_length): bucket.loss for bucket in means},
        "heldout_errors": {str(bucket.context_length): bucket.standard_error for bucket in means},
        "training_bytes": len(train),
        "heldout_bytes": len(heldout),
    }


def read_text(folders: Sequence[pathlib.Path]) -> tuple[Int[np.ndarray, " t"], Int[np.ndarray, " h"]]:
    """Returns the bytes of the text files in the folders, for training and held out.

    Files of one subfolder, two levels deep, follow each other and are on the same side, so that long contexts are of
    one project. At most `MOST_BYTES` of all folders are read.
    """
    parts: tuple[list[bytes], list[bytes]] = [], []
    groups: dict[tuple, int] = {}
    size = 0
    paths = [(folder, path) for folder in folders for path in sorted(folder.rglob("*"))]
    for folder, path in paths:
        above = path.relative_to(folder).parts[:-1]
        # Packages inside the standard library's folder come again as packages, maybe on the other side.
        inside = above and above[0] in ("site-packages", "dist-packages")
        if inside or path.suffix not in SUFFIXES or not path.is_file():
            continue
        content = path.read_bytes()
        if size + len(content) > MOST_BYTES:
            break
        # Numbered as they come, so that every tenth is held out whatever their names.
        group = groups.setdefault((folder, *above[:2]), len(groups) + 1)
        parts[group % HELDOUT == 0].append(content)
        size += len(content)
    train, heldout = (np.frombuffer(b"\n".join(part), np.uint8) for part in parts)
    return train, heldout


def _batches(
    text: Int[np.ndarray, " t"], context: int, batch_size: int
) -> Iterator[dict[str, Int[np.ndarray, "b context"]]]:
    """Yields batches of random windows of the text, indefinitely."""
    random = np.random.default_rng(0)
    while True:
        starts = random.integers(len(text) - context, size=batch_size)
        tokens = np.stack([text[start : start + context + 1] for start in starts]).astype(np.int32)
        yield {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


if __name__ == "__main__":
    main()
