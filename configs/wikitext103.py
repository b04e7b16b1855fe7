"""A language model of WikiText-103 (Qin et al. 2023, Table 8, ALM): `--config=configs/wikitext103.py:type1`.

The argument names a method of the paper's tables; see `sympow_jax.config.LRPE_METHODS`. `data.paths` are token files
over the corpus's vocabulary of 267,744 words, created by `sympow prepare` with a word-level
tokenizer. Books has 50,265 tokens: `--config.model.vocab_size=50304`. Weight decay is decoupled and applies to matrices
only.
"""

from sympow_jax import config


def get_config(method: str = "type2") -> config.Config:
    """Returns a decoder of 6 layers of width 512, trained for 50,000 updates of 128 rows of 512 tokens."""
    return config.Config(
        model=config.ModelConfig(
            vocab_size=267_776,
            layers=6,
            width=512,
            heads=8,
            activation="relu",
            attention=config.lrpe_method(method),
        ),
        data=config.DataConfig(
            source="tokens",
            paths=("data/wikitext103/train.bin",),
            heldout_paths=("data/wikitext103/heldout.bin",),
            token_dtype="uint32",
            document_separator=0,
            context_length=512,
            batch_tokens=128 * 512,
        ),
        optimizer=config.OptimizerConfig(
            name="adamw",
            learning_rate=5e-4,
            b2=0.98,
            schedule="inverse_sqrt",
            warmup_steps=4000,
            weight_decay=0.01,
        ),
        training=config.TrainingConfig(steps=50_000),
        evaluation=config.EvaluationConfig(context_lengths=(512,)),
    )
