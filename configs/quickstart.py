"""A conformal-sympow byte model of the Python standard library: five minutes on two CPU cores.

`configs/quickstart.py:sympow` trains another preset; see `sympow_jax.config.PRESETS`.
"""

from sympow_jax import config


def get_config(preset: str = "conformal") -> config.Config:
    """Returns a 2-layer model trained at context 256 and evaluated up to 4,096."""
    return config.Config(
        model=config.ModelConfig(**config.MODEL_SIZES["quickstart"], attention=config.preset(preset)),
        data=config.DataConfig(source="text", context_length=256, batch_tokens=4096),
        optimizer=config.OptimizerConfig(learning_rate=2e-3, warmup_steps=50, clip_norm=1.0),
        training=config.TrainingConfig(steps=450, checkpoint_every=200),
        evaluation=config.EvaluationConfig(context_lengths=(64, 128, 256, 512, 1024, 2048, 4096)),
    )
