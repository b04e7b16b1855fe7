"""Attention with a recurrent state whose size you choose.

`ops` has functions of arrays, `layers` and `models` have Flax modules, `config` has their settings. Each subpackage is
imported on first use, so `import sympow_jax` itself does not import jax or flax. `data`, `tasks`, `training`, `loop`,
`evaluation`, `inspection`, `generation` and `weights` need the extra `train`, some of them only in part.

Examples:
    >>> import jax.numpy as jnp
    >>> import sympow_jax
    >>> x = jnp.ones((1, 8, 2, 4))
    >>> sympow_jax.ops.power_attention(x, x, x).shape
    (1, 8, 2, 4)
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sympow_jax import (
        array_types,
        config,
        data,
        evaluation,
        generation,
        inspection,
        layers,
        loop,
        models,
        ops,
        process,
        tasks,
        training,
        weights,
    )

    __version__: str

__all__ = [
    "__version__",
    "array_types",
    "config",
    "data",
    "evaluation",
    "generation",
    "inspection",
    "layers",
    "loop",
    "models",
    "ops",
    "process",
    "tasks",
    "training",
    "weights",
]


def __getattr__(name: str):
    if name == "__version__":
        # Read on first use, because package metadata takes longer to read than the rest of the import.
        metadata = importlib.import_module("importlib.metadata")
        try:
            return metadata.version("sympow-jax")
        except metadata.PackageNotFoundError:
            return "uninstalled"  # a checkout on the module path
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
