"""What a program is compiled for."""

import contextlib
import contextvars

import jax

__all__ = ["interpret", "interpreted", "is_hopper", "require_hopper"]

_HOPPER_KINDS = ("H100", "H200", "H20", "H800", "GH200")
_interpret = contextvars.ContextVar("interpret", default=None)


@contextlib.contextmanager
def interpreted(parameters):
    """Runs kernels in the GPU interpreter, with its parameters, where they are traced within: for tests."""
    token = _interpret.set(parameters)
    try:
        yield
    finally:
        _interpret.reset(token)


def interpret():
    """The parameters of `interpreted`, or None."""
    return _interpret.get()


def is_hopper() -> bool:
    """Whether the program is for GPUs of compute capability 9.x.

    A mesh in scope says what the program is for, else the default devices. A GPU of no known kind, as programs are
    compiled for ahead of time, is taken for one.
    """
    if interpret() is not None:
        return True
    device = _device()
    if hasattr(device, "compute_capability"):
        return str(device.compute_capability).startswith("9.")
    if device.device_kind:
        return any(kind in device.device_kind for kind in _HOPPER_KINDS)
    return device.platform == "gpu"


def require_hopper() -> None:
    """Raises NotImplementedError unless `is_hopper`."""
    if not is_hopper():
        device = _device()
        raise NotImplementedError(
            f"implementation 'mosaic_gpu' needs a Hopper GPU (compute capability 9.x), "
            f"not {device.device_kind or device.platform}"
        )


def _device():
    abstract = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return jax.devices()[0] if abstract is None else abstract
