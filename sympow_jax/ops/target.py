"""Device that a program is compiled for, and the kernels that may run on it."""

import contextlib
import contextvars
import importlib
import math
import os

import jax

_HOPPER_KINDS = ("H100", "H200", "H20", "H800", "GH200")
_interpret = contextvars.ContextVar("interpret", default=None)


@contextlib.contextmanager
def interpreted(parameters):
    """Runs kernels that are traced within this context in the GPU interpreter, with its parameters; for tests."""
    token = _interpret.set(parameters)
    try:
        yield
    finally:
        _interpret.reset(token)


def interpret():
    """Returns the parameters of `interpreted`, or None."""
    return _interpret.get()


def is_hopper() -> bool:
    """Returns whether the program is compiled for GPUs of compute capability 9.x.

    The target is the mesh in scope, else the default device. A GPU without a device kind, as in ahead-of-time
    compilation, counts as a Hopper GPU.
    """
    if interpret() is not None:
        return True
    current = device()
    if hasattr(current, "compute_capability"):
        return str(current.compute_capability).startswith("9.")
    if current.device_kind:
        return any(kind in current.device_kind for kind in _HOPPER_KINDS)
    return current.platform == "gpu"


def trusts_kernels(family: str) -> bool:
    """Returns whether kernels may be chosen by default: a check on this kind of machine verified them.

    Interpreted kernels are always trusted.

    Args:
        family: one of `pallas_kernels.check.verdict.FAMILIES`.
    """
    if interpret() is not None:
        return True
    verdict = importlib.import_module("pallas_kernels.check.verdict")
    return verdict.trusted(family, device().device_kind)


def device():
    """Returns a device that the program is compiled for.

    It is one of the mesh in scope, which may be abstract, else the default device.
    """
    abstract = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return _default_device() if abstract is None else abstract


def device_count() -> int:
    """Returns the number of devices of the mesh in scope over which arrays of this program may be divided."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(size for axis, size in mesh.shape.items() if axis not in mesh.manual_axes)


def memory_bytes() -> int:
    """Returns the bytes of memory of the default device."""
    device = _default_device()
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _default_device():
    """Returns the device of `jax.default_device`, which may name a platform, else the first local device."""
    default = jax.config.jax_default_device
    return jax.local_devices(backend=default)[0] if default is None or isinstance(default, str) else default
