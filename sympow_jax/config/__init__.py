"""Every setting of a run as frozen dataclasses, validated on construction.

A file in `configs/` returns a `Config`; the command line overrides fields of it with `--config.a.b=value`. The presets
are named as in the papers; each sets a kernel, a decay and a position encoding.
"""

from sympow_jax.config.attention import (
    AttentionConfig,
    LrpeConfig,
    RopeConfig,
    lrpe_method,
    preset,
    preset_name,
)
from sympow_jax.config.attention.presets import LRPE_METHODS, PRESETS
from sympow_jax.config.checks import require_choice
from sympow_jax.config.data import DataConfig, source_of
from sympow_jax.config.loading import load, override
from sympow_jax.config.model import MODEL_SIZES, ModelConfig
from sympow_jax.config.optimizer import OptimizerConfig
from sympow_jax.config.run import Config, EvaluationConfig, ShardingConfig, TrainingConfig
from sympow_jax.config.task import Predicted, TaskConfig

__all__ = [
    "LRPE_METHODS",
    "MODEL_SIZES",
    "PRESETS",
    "AttentionConfig",
    "Config",
    "DataConfig",
    "EvaluationConfig",
    "LrpeConfig",
    "ModelConfig",
    "OptimizerConfig",
    "Predicted",
    "RopeConfig",
    "ShardingConfig",
    "TaskConfig",
    "TrainingConfig",
    "load",
    "lrpe_method",
    "override",
    "preset",
    "preset_name",
    "require_choice",
    "source_of",
]
