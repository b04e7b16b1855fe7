"""Text, token files and Zarr arrays as training rows and held-out documents; knows nothing of models."""

from sympow_jax.data.documents import HeldoutDocuments
from sympow_jax.data.pipeline import batches, describe, heldout_documents, train_dataset

__all__ = ["HeldoutDocuments", "batches", "describe", "heldout_documents", "train_dataset"]
