"""Predicts training on 8, 64 and 512 H100s from operation and byte counts, and writes the page about it.

    uv run python -m benchmarks.scaling --out=docs/scaling.md

Nothing is measured. It needs no GPU and takes seconds on any machine.
"""

import argparse
import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

from benchmarks import _scaling, predicted
from sympow_jax import config

GPUS = (8, 64, 512)
CONTEXTS = (4096, 65_536, 1_048_576)
# Tokens per batch, by model; a batch is one row if the context is longer.
MODELS = {"gpt2_124m": 524_288, "gpt3_1311m": 1_048_576}
# Plans for one job, to compare the costs of the axes.
OTHERS = (
    _scaling.Plan(data=16, context=4),
    _scaling.Plan(fsdp=16, context=4),
    _scaling.Plan(data=8, context=8),
    _scaling.Plan(fsdp=8, context=8),
    _scaling.Plan(data=16, tensor=4),
    _scaling.Plan(data=8, tensor=8),
    _scaling.Plan(data=4, context=16),
    _scaling.Plan(context=64),
)
OTHERS_OF = ("gpt3_1311m", 65_536, 64)


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the page to a file, or prints it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=pathlib.Path, help="the Markdown file; without it, standard output")
    options = parser.parse_args(arguments)
    text = page(_scaling.H100S)
    if options.out is None:
        print(text)
    else:
        options.out.write_text(text)


def page(cluster: _scaling.Cluster) -> str:
    """Returns the whole page in Markdown."""
    parts = [_INTRODUCTION, _of_computation(cluster), _OF_TRAFFIC]
    for name in MODELS:
        rows = predictions(name, cluster)
        parts += [_title(name), _steps(rows), _SENT, _sent(rows)]
    parts += [_comparison(cluster), _findings(cluster)]
    return "\n\n".join(parts) + "\n"


def predictions(name: str, cluster: _scaling.Cluster) -> list[_scaling.Prediction]:
    """Returns the best plan for each context and number of GPUs; the largest number also with 8 times the batch."""
    found = []
    for context in CONTEXTS:
        job = job_of(name, context)
        found += [_scaling.best(job, gpus, cluster) for gpus in GPUS]
        found.append(_scaling.best(job_of(name, context, batches=8), GPUS[-1], cluster))
    return found


def job_of(name: str, context: int, *, batches: int = 1) -> _scaling.Job:
    """Returns the job of a model of `MODELS`, conformal at p = 2, with `batches` times its batch."""
    sizes: Any = config.MODEL_SIZES[name]
    model = config.ModelConfig(**sizes, attention=config.preset("conformal"))
    return _scaling.Job(model, context, batches * max(MODELS[name], context))


_INTRODUCTION = """\
# Scaling on paper

How fast training should be on 8, 64 and 512 H100s, from counts of operations and bytes alone. **Everything on this \
page is predicted; nothing was measured**, neither a kernel nor a link nor a step. Real steps are slower where a \
product, a kernel or a collective misses what is assumed of it below. The page is written by

```
uv run python -m benchmarks.scaling --out=docs/scaling.md
```

The models are conformal at p = 2. For each number of GPUs, all products of powers of two over the four mesh axes \
were compared, with each `model.remat` and both forms of attention. A row is the one that divides over fewest axes \
among those that fit in memory and whose step is within 2% of the shortest. On 512 GPUs a second row has eight times \
the batch."""

_SENT = "GB a GPU sends in a step, by NVLink and by InfiniBand (IB):"


def _of_computation(cluster: _scaling.Cluster) -> str:
    kernels = predicted.HOPPER
    both = ", ".join(f"{factor} times in the {form} form" for form, factor in kernels.both_passes.items())
    return f"""\
## What is assumed

Of the machine, each rate a GPU and one way:

| | |
|---|---|
| dense products in bfloat16 | {cluster.sustained:g} of {cluster.peak / 1e12:.0f} TFLOP/s |
| memory | {cluster.memory_sustained:g} of {cluster.memory_bandwidth / 1e12:g} TB/s; {cluster.memory / 1e9:.0f} of \
80 GB may be filled by what is counted below |
| NVLink, within a node of {cluster.node} | {cluster.nvlink / 1e9:.0f} GB/s, {cluster.nvlink_latency * 1e6:g} us for \
a round of messages |
| InfiniBand, between nodes | {cluster.infiniband / 1e9:.0f} GB/s (400 Gb/s), {cluster.infiniband_latency * 1e6:g} us |

Of the computation on a GPU:

* Products with weights take 2 FLOPs a weight and token, three times: forward, and twice that backward. Logits are \
computed once more in the backward pass. `model.remat` computes all products of a block once more, `full` its \
attention too.
* Attention takes what its kernels are predicted to take on an H100 (`benchmarks/predicted.py`); both passes \
take the forward pass {both}.
* Everything between products moves memory: {_scaling._STREAM_BYTES} bytes a token and channel of the residual stream \
in the forward pass of a block (norms, additions), {_scaling._HEAD_BYTES} a channel of a head (rotations), \
{_scaling._HIDDEN_BYTES} a hidden unit (activation), as much again wherever the block is computed again, and twice as \
much in the backward pass; {_scaling._LOGIT_BYTES} bytes a token and entry of the vocabulary for the loss. What XLA \
fuses better or worse than that is not known.
* The optimizer reads and writes {_scaling._OPTIMIZER_BYTES} bytes a parameter that the GPU holds.
* Memory is parameters, gradients and Adam's two moments in float32 ({_scaling._STATE_BYTES} bytes a parameter), and \
what the forward pass keeps for the backward pass, by what compiled steps take ([memory](memory.md))."""


_OF_TRAFFIC = """\
Of the traffic in a step, P being parameters, n the GPUs along an axis, and a GPU's share of activations [B, T, M]:

| axis | what is sent | bytes a GPU |
|---|---|---|
| `data` | all-reduce of gradients in float32, over `data` and `context`, since these hold the same parameters | \
2 (n - 1) / n x 4 P / (fsdp tensor) |
| `fsdp` | all-gather of parameters in bfloat16, in the forward and the backward pass (and where a block is computed \
again; the embedding once in float32), reduce-scatter of gradients in float32 | (n - 1) / n x (2 x 2 P + 4 P) / tensor |
| `context`, chunked form | to the next device the last W = 64 keys and values in bfloat16, then 1 + ceil(log2(n - 1)) \
times its states in float32, in each layer; in the backward pass as much | 2 x (2 x 64 K (D + E) + (1 + ceil(log2(n - \
1))) x 4 K F (E + 1)) a row and layer, F = 2,080 |
| `context`, attention form | all-to-alls of query, key, value and output in bfloat16, in each layer; in the backward \
pass as many | 2 x (n - 1) / n x 2 B T (2 N D + 2 K D) a layer |
| `tensor` | two all-reduces of activations in bfloat16 in each block and pass (and as many as a pass where it is \
computed again), and one before the logits; the embedding in float32 for the lookup | 2 (n - 1) / n x 2 B T M, four \
times a layer and once more, and (n - 1) / n x 4 V M / fsdp |

Gathers, scatters and all-reduces go first through NVLink within a node, then each GPU sends its part between nodes \
on its own link; the sum of bytes is the same. There is one collective a layer, of ceil(log2 n) rounds of messages, \
an all-reduce of twice as many; a round takes InfiniBand's time where any of it crosses nodes. What is handed from \
device to device over `context` goes at InfiniBand's speed once any pair of neighbors is in two nodes. The mesh \
puts `tensor` closest, then `context`, `fsdp` and `data`.

**What overlaps** decides most where there are many GPUs, so steps are given twice: if gradients hide behind the \
backward pass and gathered parameters behind any computation, as far as these last; and if nothing does. `context` and \
`tensor` never hide: the next operation needs what they bring. Arrangements were chosen for the latter case. Reading \
data, checkpoints, stragglers and what XLA launches one by one are left out."""


def _title(name: str) -> str:
    sizes: Any = config.MODEL_SIZES[name]
    return (
        f"## {name}\n\n{sizes['layers']} layers of width {sizes['width']:,}, {sizes['heads']} heads of 64, "
        f"{MODELS[name]:,} tokens a batch or one row. Ranges run from all that can be hidden to nothing hidden; the "
        f"last column is of the latter."
    )


def _steps(rows: Sequence[_scaling.Prediction]) -> str:
    header = (
        "context",
        "GPUs",
        "tokens a batch",
        "arrangement",
        "form",
        "remat",
        "step, ms",
        "million tokens/s",
        "MFU",
        "GB a GPU",
        "takes most",
    )
    return _table(
        header,
        [
            (
                *_job_cells(row),
                _arrangement(row.plan),
                row.plan.form,
                row.plan.remat,
                *_timing_cells(row),
                f"{row.memory / 1e9:.0f}",
                _largest(row),
            )
            for row in rows
        ],
    )


def _sent(rows: Sequence[_scaling.Prediction]) -> str:
    header = ("context", "GPUs", "tokens a batch", *_scaling.AXES, "ms in all, unhidden")
    return _table(
        header,
        [
            (
                *_job_cells(row),
                *(_bytes(row.traffic[axis]) for axis in _scaling.AXES),
                _number(1e3 * sum(map(row.sent_seconds, _scaling.AXES))),
            )
            for row in rows
        ],
    )


def _comparison(cluster: _scaling.Cluster) -> str:
    name, context, gpus = OTHERS_OF
    job = job_of(name, context)
    rows = []
    for other in OTHERS:
        plans = [dataclasses.replace(other, remat=remat) for remat in _scaling.REMATS]
        found = [_scaling.predict(job, plan, cluster) for plan in plans]
        fitting = [one for one in found if one.memory <= cluster.memory]
        row = min(fitting or found[-1:], key=lambda one: one.step_seconds)
        note = "" if fitting else "does not fit"
        sent = (_bytes(row.traffic[axis]) for axis in _scaling.AXES)
        timing = _timing_cells(row)
        cells = (_arrangement(row.plan), row.plan.remat, timing[0], timing[2], f"{row.memory / 1e9:.0f}")
        rows.append((*cells, *sent, note or _largest(row)))
    header = ("arrangement", "remat", "step, ms", "MFU", "GB a GPU", *_scaling.AXES, "takes most")
    return (
        f"## The same job by other arrangements\n\n{name} at {context:,} tokens on {gpus} GPUs, "
        f"{job.rows} rows a batch, in the chunked form.\n\n{_table(header, rows)}"
    )


def _findings(cluster: _scaling.Cluster) -> str:
    few, most = GPUS[0], GPUS[-1]
    small = _scaling.best(job_of("gpt2_124m", 4096), few, cluster)
    strained = _scaling.best(job_of("gpt2_124m", 4096), most, cluster)
    larger = _scaling.best(job_of("gpt2_124m", 4096, batches=8), most, cluster)
    near = _scaling.predict(job_of("gpt2_124m", 1_048_576), _scaling.Plan(context=8), cluster)
    far = _scaling.predict(job_of("gpt2_124m", 1_048_576), _scaling.Plan(context=64), cluster)
    rounds = strained.traffic["data"].rounds * cluster.infiniband_latency
    chunked, attention = (
        _scaling.predict(
            job_of("gpt3_1311m", 65_536), _scaling.Plan(data=8, context=8, form=form), cluster
        ).traffic["context"]
        for form in ("chunked", "attention")
    )
    gathered, whole = (
        _scaling.predict(job_of("gpt3_1311m", 65_536), plan, cluster)
        for plan in (_scaling.Plan(fsdp=8, context=8), _scaling.Plan(data=8, context=8))
    )
    return f"""\
## What stands out

* **124M parameters are too few for {most} GPUs at 524,288 tokens a batch.** A GPU has \
{strained.job.batch_tokens * strained.plan.tensor // most:,} tokens ({_arrangement(strained.plan)}), computes for \
{1e3 * strained.compute_seconds:.1f} ms of a step of {1e3 * strained.step_seconds:.1f} ms, and waits for gradients \
for {1e3 * strained.sent_seconds("data"):.1f} ms, {1e3 * rounds:.1f} of them for rounds of messages, which its \
backward pass is too short to hide. \
MFU falls from {_percent(small.mfu(small.step_seconds))}% on {few} GPUs to \
{_percent(strained.mfu(strained.step_seconds))}%, unhidden. With eight times the batch it is \
{_percent(larger.mfu(larger.step_seconds))} to {_percent(larger.mfu(larger.hidden_step_seconds))}%.
* **At width 768 memory bandwidth takes as long as products**: on {few} GPUs, \
{1e3 * small.computation["memory"]:.0f} ms a step for what lies between products and for logits, \
{1e3 * small.computation["products"]:.0f} ms for products. That bounds MFU near \
{_percent(small.mfu(small.hidden_step_seconds))}% whatever the number of GPUs; the 1.3B model, of width 2,048, \
comes further.
* **Within a node, dividing the sequence is nearly free; between nodes, its states are not.** A row of 1,048,576 \
tokens on {near.plan.context} GPUs sends {near.traffic["context"].total / 1e9:.2f} GB a GPU and step over `context`, \
{1e3 * near.sent_seconds("context"):.1f} ms by NVLink; on {far.plan.context} GPUs \
{far.traffic["context"].total / 1e9:.2f} GB and {1e3 * far.sent_seconds("context"):.0f} ms by InfiniBand, where the \
rest of the step computes for {1e3 * far.compute_seconds:.0f} ms. Rows on `data` between nodes and `context` within \
them is the better arrangement where a batch has enough rows.
* **The chunked form's traffic over `context` does not grow with the context**: states and windows have one size. \
For the 1.3B model at 65,536 tokens over 8 GPUs it is {chunked.total / 1e9:.2f} GB a step and GPU, and \
{attention.total / 1e9:.2f} GB in the attention form.
* **Beside a `context` that fills the node, `fsdp` gathers between nodes.** For the 1.3B model at 65,536 tokens on 64 \
GPUs, fsdp 8 x context 8 takes {_number(1e3 * gathered.hidden_step_seconds)} to \
{_number(1e3 * gathered.step_seconds)} ms a step and data 8 x context 8 {_number(1e3 * whole.hidden_step_seconds)} to \
{_number(1e3 * whole.step_seconds)} ms: where parameters and moments fit on every GPU, `data` depends less on what \
hides.
* **`tensor` is for few rows.** It sends activations in every block, which cannot hide; it is chosen only where a \
batch has fewer rows than there are GPUs, and stays within a node."""


def _job_cells(row: _scaling.Prediction) -> tuple[str, str, str]:
    return f"{row.job.context_length:,}", str(row.plan.gpus), f"{row.job.batch_tokens:,}"


def _timing_cells(row: _scaling.Prediction) -> tuple[str, str, str]:
    """Formats step time, tokens per second and MFU, each as a range from the better to the worse case."""
    both = (row.hidden_step_seconds, row.step_seconds)
    return (
        _range([_number(1e3 * seconds) for seconds in both]),
        _range([_number(row.job.batch_tokens / seconds / 1e6) for seconds in both]),
        _range([_percent(row.mfu(seconds)) for seconds in both]) + "%",
    )


def _range(texts: Sequence[str]) -> str:
    return texts[0] if len(set(texts)) == 1 else "–".join(texts)


def _number(value: float) -> str:
    """Formats a number with three significant digits, or all digits before the decimal point."""
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def _percent(part: float) -> str:
    return f"{100 * part:.0f}"


def _arrangement(plan: _scaling.Plan) -> str:
    sizes = ((axis, getattr(plan, axis)) for axis in _scaling.AXES)
    return " x ".join(f"{axis} {size}" for axis, size in sizes if size > 1)


def _largest(row: _scaling.Prediction) -> str:
    name, part = row.largest
    return f"{name} {_percent(part)}%"


def _bytes(traffic: _scaling.Traffic) -> str:
    """Formats traffic in GB, by NVLink and by InfiniBand."""
    if not traffic.total:
        return "-"
    links = {"NVLink": traffic.nvlink, "IB": traffic.infiniband}
    return " + ".join(f"{_number(sent / 1e9)} {name}" for name, sent in links.items() if sent)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Formats a Markdown table with numbers aligned to the right."""
    numbers = [all(set(row[n]) <= set("0123456789.,–%") for row in rows) for n in range(len(header))]
    ends = ["---:" if number else "---" for number in numbers]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ends, *rows))


if __name__ == "__main__":
    main()
