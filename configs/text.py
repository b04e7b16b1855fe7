"""A byte model of your own files: `--config='configs/text.py:books/*.txt'`.

Separate several globs, files or folders with commas. Of a file that is named, the last tenth is held out, and of a glob
or folder, a tenth of the files. The run ends with the loss on it by context length.
"""

from sympow_jax import config


def get_config(*paths: str) -> config.Config:
    """Returns a 4-layer conformal-sympow model trained at context 1,024 on the files named by `paths`."""
    if not any(paths):
        raise ValueError("configs/text.py needs files: --config='text:books/*.txt'")
    return config.Config(
        model=config.ModelConfig(
            vocab_size=256,
            layers=4,
            width=256,
            heads=8,
            dtype="float32",
            attention=config.preset("conformal"),
        ),
        data=config.DataConfig(
            source="text",
            paths=paths,
            context_length=1024,
            batch_tokens=16_384,
            packing="documents",
        ),
        optimizer=config.OptimizerConfig(
            learning_rate=1e-3, schedule="cosine", warmup_steps=100, clip_norm=1.0
        ),
        training=config.TrainingConfig(steps=5000, checkpoint_every=500),
    )
