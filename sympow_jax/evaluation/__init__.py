"""Loss at context lengths within and beyond the training context, and metrics on held-out rows."""

from sympow_jax import extras

with extras.required("train", __name__):
    from sympow_jax.evaluation.buckets import Bucket, parse_lengths, select_documents
    from sympow_jax.evaluation.heldout import evaluate_heldout, heldout_metrics
    from sympow_jax.evaluation.periodic import Periodic
    from sympow_jax.evaluation.report import Row
    from sympow_jax.evaluation.runs import context_loss, evaluate_runs
    from sympow_jax.evaluation.streaming import token_losses
    from sympow_jax.evaluation.tasks import check_settings, evaluate, finish

__all__ = [
    "Bucket",
    "Periodic",
    "Row",
    "check_settings",
    "context_loss",
    "evaluate",
    "evaluate_heldout",
    "evaluate_runs",
    "finish",
    "heldout_metrics",
    "parse_lengths",
    "select_documents",
    "token_losses",
]
