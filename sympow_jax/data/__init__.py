"""Rows and held-out documents from text, token files, Zarr arrays, and labeled texts and images."""

from sympow_jax import extras

with extras.required("train", __name__):
    from sympow_jax.data.codec import Codec, codec_of_run
    from sympow_jax.data.documents import HeldoutDocuments
    from sympow_jax.data.pipeline import (
        batches,
        describe,
        heldout_batch,
        heldout_documents,
        heldout_rows,
        train_dataset,
    )

__all__ = [
    "Codec",
    "HeldoutDocuments",
    "batches",
    "codec_of_run",
    "describe",
    "heldout_batch",
    "heldout_documents",
    "heldout_rows",
    "train_dataset",
]
