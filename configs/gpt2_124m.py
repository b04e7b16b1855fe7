"""The papers' recipe: 124M parameters in GPT-2's shape on LongCrawl64, 524,288 tokens per batch, Adam at 6e-4.

`--config=configs/gpt2_124m.py:PRESET[,p=POWER][,context=TOKENS]`, for instance `:softmax` or
`:conformal,p=4,context=16384`; see `sympow_jax.config.PRESETS`. The papers use p = 2, 4 and 6 and contexts
256 to 65,536. `data.paths` and `data.heldout_paths` are the locations of the two arrays, which may be in an object
store. The batch fits on eight devices of 80 GB; with n times fewer devices, set `--config.optimizer.accumulate` n times
as high.
"""

import dataclasses

from sympow_jax import config

# Powers of two up to the length of a LongCrawl64 document; the papers train at each.
CONTEXTS = tuple(2**exponent for exponent in range(8, 17))


def get_config(preset: str = "conformal", *, p: int = 2, context: int = 4096) -> config.Config:
    """Returns the model named by `preset`, trained at `context` and evaluated up to 65,536 tokens."""
    config.require_choice("context", context, CONTEXTS)
    attention = config.preset(preset, power=p)
    if attention.longest_document is not None:
        # Learned positions need a table as long as the context.
        attention = dataclasses.replace(attention, max_document_length=context)
    return config.Config(
        model=config.ModelConfig(**config.MODEL_SIZES["gpt2_124m"], attention=attention),
        data=config.DataConfig(
            source="longcrawl64",
            paths=("data/longcrawl64/train.zarr",),
            heldout_paths=("data/longcrawl64/heldout.zarr",),
            context_length=context,
            batch_tokens=524_288,
        ),
        optimizer=config.OptimizerConfig(learning_rate=6e-4),
        training=config.TrainingConfig(steps=100_000),
        evaluation=config.EvaluationConfig(context_lengths=CONTEXTS),
    )
