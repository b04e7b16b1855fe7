import dataclasses
from pallas_kernels.power_state import config as configs
from pallas_kernels.power_state import quartic_far_vjp as far
def for_kernels(config, layout, chunk, window):
    most = 3 if layout.head_dim == layout.value_dim == 16 else 2
    return dataclasses.replace(config, query_blocks=next(c for c in (3,2,1) if c <= most and chunk % (64*c) == 0), state_stages=2)
