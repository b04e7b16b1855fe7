"""Rows and held-out documents from text, token files, Zarr arrays, corpora, and labeled texts and images."""

from sympow_jax import extras

with extras.required("train", __name__):
    from sympow_jax.data.codec import Codec, codec_of_run
    from sympow_jax.data.documents import HeldoutDocuments
    from sympow_jax.data.pipeline import (
        HeldoutData,
        compare_metadata,
        describe,
        open_run,
        require_held_apart,
        require_outside_workdir,
        train_dataset,
    )

__all__ = [
    "Codec",
    "HeldoutData",
    "HeldoutDocuments",
    "codec_of_run",
    "compare_metadata",
    "describe",
    "open_run",
    "require_held_apart",
    "require_outside_workdir",
    "train_dataset",
]
