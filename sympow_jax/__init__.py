"""Attention with a recurrent state whose size you choose.

`from sympow_jax import ops` for functions of arrays, `layers` and `models` for Flax modules, `config` for their
settings. Data, training, evaluation and generation need the extra `train`.
"""
