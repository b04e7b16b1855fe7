"""Evaluation of models on the tasks of `lm-eval`, EleutherAI's Language Model Evaluation Harness."""
