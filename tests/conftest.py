"""Settings of every test."""

import os

# The suite compiles hundreds of small programs and runs each once: LLVM's costly passes are not worth their time here.
os.environ.setdefault(
    "XLA_FLAGS", "--xla_backend_optimization_level=1 --xla_llvm_disable_expensive_passes=true"
)
