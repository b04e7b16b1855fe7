"""Loss at context lengths within and beyond the training context, and metrics on held-out rows."""

from sympow_jax import extras

with extras.required("train", __name__):
    from sympow_jax.evaluation.buckets import Bucket, parse_lengths, select_documents
    from sympow_jax.evaluation.by_task import check_settings, evaluate, finish
    from sympow_jax.evaluation.context_length import context_loss, evaluate_runs
    from sympow_jax.evaluation.context_tasks.prompts import Material
    from sympow_jax.evaluation.context_tasks.results import TaskResult
    from sympow_jax.evaluation.context_tasks.runs import context_task_results, evaluate_context_tasks
    from sympow_jax.evaluation.heldout import evaluate_heldout, heldout_metrics
    from sympow_jax.evaluation.periodic import Periodic
    from sympow_jax.evaluation.report import Row
    from sympow_jax.evaluation.scores import Case, Question, Score, answer_scores, token_losses

__all__ = [
    "Bucket",
    "Case",
    "Material",
    "Periodic",
    "Question",
    "Row",
    "Score",
    "TaskResult",
    "answer_scores",
    "check_settings",
    "context_loss",
    "context_task_results",
    "evaluate",
    "evaluate_context_tasks",
    "evaluate_heldout",
    "evaluate_runs",
    "finish",
    "heldout_metrics",
    "parse_lengths",
    "select_documents",
    "token_losses",
]
