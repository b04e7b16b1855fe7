"""GPT-2 (Radford et al. 2019), trained further from its published weights: `--config=configs/gpt2.py[:SIZE]`.

SIZE is `gpt2`, `gpt2-medium`, `gpt2-large` or `gpt2-xl`. `task.initial_run` is a workdir created by
`sympow weights import`. The attention may differ from the one that the weights were trained with:

    uv run train.py --config=configs/gpt2.py --workdir=runs/power --config.task.initial_run=runs/gpt2 \
        --config.model.attention.kernel=power

See docs/weights.md. `data.paths` are token files created by `sympow prepare --tokenizer=gpt2`.
"""

from sympow_jax import config

SIZES = {
    "gpt2": "gpt2_124m",
    "gpt2-medium": "gpt2_335m",
    "gpt2-large": "gpt2_774m",
    "gpt2-xl": "gpt2_1558m",
}


def get_config(size: str = "gpt2") -> config.Config:
    """Returns the published shape, trained at its context of 1,024 tokens with 64 rows per batch."""
    config.require_choice("size", size, SIZES)
    shape = config.MODEL_SIZES[SIZES[size]] | {"vocab_size": 50_257}
    return config.Config(
        model=config.ModelConfig(**shape, biases=True, embedding_norm=False, attention=config.preset("gpt2")),
        data=config.DataConfig(
            source="tokens",
            paths=("data/train.bin",),
            document_separator=50_256,
            context_length=1024,
            batch_tokens=65_536,
        ),
        optimizer=config.OptimizerConfig(
            name="adamw",
            learning_rate=1e-4,
            schedule="cosine",
            warmup_steps=100,
            weight_decay=0.01,
            clip_norm=1.0,
        ),
        training=config.TrainingConfig(steps=10_000),
    )
