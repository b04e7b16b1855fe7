"""Masked tokens in RoBERTa's shape (Qin et al. 2023, Table 8, BLM): `configs/roberta_wikibook.py:METHOD`.

METHOD is a method of the paper's tables, such as `type2`; see `sympow_jax.config.LRPE_METHODS`. `data.paths` are token
files created by `sympow prepare` with RoBERTa's tokenizer, whose last id, 50,264, is the mask. The table prints a
sequence length of 51, read here as 512. Weight decay is decoupled and applies to matrices only.
"""

from sympow_jax import config


def get_config(method: str = "type2") -> config.Config:
    """Returns 12 layers of width 768, trained for 23,000 updates of 512 rows of 512 tokens."""
    return config.Config(
        model=config.ModelConfig(
            vocab_size=50_304,
            layers=12,
            width=768,
            heads=12,
            attention=config.lrpe_method(method, causal=False),
        ),
        task=config.TaskConfig(name="masked_token", mask_token=50_264),
        data=config.DataConfig(
            source="tokens",
            paths=("data/wikibook/train.bin",),
            heldout_paths=("data/wikibook/heldout.bin",),
            document_separator=2,  # </s>
            context_length=512,
            batch_tokens=512 * 512,
        ),
        optimizer=config.OptimizerConfig(
            name="adamw",
            learning_rate=5e-4,
            b2=0.98,
            epsilon=1e-6,
            schedule="linear",
            warmup_steps=3000,
            final_fraction=0.0,
            weight_decay=0.01,
        ),
        training=config.TrainingConfig(steps=23_000),
    )
