"""Loss at context lengths within and beyond the training context: means, tables, plots."""

from sympow_jax.evaluation.buckets import Bucket, parse_lengths, select_documents
from sympow_jax.evaluation.report import Row
from sympow_jax.evaluation.runs import check_settings, context_loss, evaluate_runs
from sympow_jax.evaluation.streaming import token_losses

__all__ = [
    "Bucket",
    "Row",
    "check_settings",
    "context_loss",
    "evaluate_runs",
    "parse_lengths",
    "select_documents",
    "token_losses",
]
