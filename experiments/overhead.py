"""Measures the cost of the gate and the learned rotary: parameters, and time of inference and of training.

Appendix A.5 of "Conformal Transformations for Symmetric Power Transformers" (Kumar et al. 2025) has 0.09 % more
parameters with the gate, 0.18 % with both, and inference 1.06 times as long at 16,384 tokens in the attention form.
Parameters are counted for the 124M model at either scale. Times are those of the toy or the 124M model on this machine,
measured in turns, with the power of --power.
"""

import dataclasses
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from experiments import _shared
from sympow_jax import config, models

VARIANTS = ("sympow", "gated", "conformal")
_BASE = "sympow"
# More parameters than sympow, of appendix A.5.
_PAPER = {_BASE: "", "gated": "0.09%", "conformal": "0.18%"}
# `steps` is the number of measuring rounds, `lengths` are the contexts of inference, `contexts` those of training.
PLANS = {
    "toy": _shared.Plan(seeds=(0,), steps=15, contexts=(1024,), lengths=(4096,)),
    "paper": _shared.Plan(seeds=(0,), steps=30, contexts=(16_384,), lengths=(16_384,)),
    "tiny": _shared.Plan(seeds=(0,), steps=2, contexts=(16,), lengths=(32,)),
}
# At p = 4 a head of 32 has 52,360 features, with which the chunked form takes seconds per call.
_FORMS = {2: ("attention", "chunked"), 4: ("attention",)}


def _experiment(options: _shared.Options) -> None:
    counts = parameter_counts(options.variants)
    rows = [row for form in _FORMS[options.power] for row in _measure(options, form)]
    path = options.write(rows, power=options.power, parameters=counts)
    _shared.draw_values(
        path,
        [
            (f"{row['what']}, {row['form']} form: {row['variant']}", row["relative"], row["low"], row["high"])
            for row in rows
            if row["variant"] != _BASE
        ],
        title="Time relative to sympow",
        subtitle="median over rounds, and the middle half of them",
        x_label="time relative to sympow",
    )


def tables(content: Mapping[str, Any]) -> list[_shared.Table]:
    """Returns the tables of an experiment's JSON."""
    counts, power = content["parameters"], content["power"]
    measured: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in content["rows"]:
        measured.setdefault(f"{row['what']}, {row['form']} form", {})[row["variant"]] = row
    variants = [name for name in counts if name != _BASE]
    return [
        _shared.Table(
            "Parameters of the 124M model",
            ("", "parameters", "more than sympow", "the paper's"),
            [
                (name, f"{count:,}", f"{count / counts[_BASE] - 1:.3%}", _PAPER[name])
                for name, count in counts.items()
            ],
        ),
        _shared.Table(
            f"Time relative to sympow, p = {power}, median over rounds taken in turns",
            (f"p = {power}", "tokens", "sympow, ms", *variants),
            [
                (
                    name,
                    f"{by[_BASE]['tokens']:,}",
                    f"{by[_BASE]['milliseconds']:.0f}",
                    *(f"{by[variant]['relative']:.2f}x" for variant in variants),
                )
                for name, by in measured.items()
            ],
        ),
    ]


def parameter_counts(variants: Sequence[str]) -> dict[str, int]:
    """Counts the parameters of the 124M model with each variant's attention."""
    attentions = _shared.power_variants(2)
    return {name: _shared.parameters(_shared.model("gpt2_124m", attentions[name])) for name in variants}


def _measure(options: _shared.Options, form: str) -> Iterator[dict[str, Any]]:
    """Yields a row for each variant: the time of inference, then that of training."""
    (context,), (tokens,) = options.plan.contexts, options.plan.lengths
    if options.scale == "paper":  # no data is read
        options = dataclasses.replace(options, data=("-",), heldout=("-",))
    settings = {}
    for name in options.variants:
        attention = dataclasses.replace(_shared.power_variants(options.power)[name], form=form)
        settings[name] = _shared.settings(options, attention, context=context, seed=0)

    def inference(one: config.Config) -> Callable[[], None]:
        """Returns a function that computes the hidden states of one row of tokens."""
        graph, params = nnx.split(models.DecoderLM(one.model, rngs=nnx.Rngs(0)))
        inputs = jax.random.randint(jax.random.key(0), (1, tokens), 0, one.model.vocab_size)
        compiled = jax.jit(lambda params, inputs: nnx.merge(graph, params).hidden(inputs))
        return lambda: jax.block_until_ready(compiled(params, inputs))

    trained = settings[_BASE].data.batch_tokens
    for what, make, count in (("inference", inference, tokens), ("training", _shared.update, trained)):
        calls = {name: make(one) for name, one in settings.items()}
        times = _shared.alternate(calls, rounds=options.plan.steps)
        for name, seconds in times.items():
            low, middle, high = _shared.relative(seconds, times[_BASE])
            about = {"variant": name, "what": what, "form": form, "tokens": count}
            about["milliseconds"] = 1000 * statistics.median(seconds)
            yield about | {"relative": middle, "low": low, "high": high}


main = _shared.Experiment(
    name="overhead",
    description=__doc__,
    plans=PLANS,
    variants=VARIANTS,
    base=_BASE,
    powers=tuple(_FORMS),
    trains=False,
    run=_experiment,
    tables=tables,
)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
