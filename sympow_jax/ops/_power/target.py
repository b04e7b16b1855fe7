"""What a program is compiled for."""

import jax

__all__ = ["require_hopper"]

_HOPPER_KINDS = ("H100", "H200", "H20", "H800", "GH200")


def require_hopper() -> None:
    """Raises NotImplementedError unless the program is for GPUs of compute capability 9.x.

    A mesh in scope says what the program is for, else the default devices. A GPU of no known kind, as programs are
    compiled for ahead of time, is taken for one.
    """
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if device is None:
        device = jax.devices()[0]
        hopper = str(getattr(device, "compute_capability", "")).startswith("9.")
    elif device.device_kind:
        hopper = any(kind in device.device_kind for kind in _HOPPER_KINDS)
    else:
        hopper = device.platform == "gpu"
    if not hopper:
        raise NotImplementedError(
            f"implementation 'mosaic_gpu' needs a Hopper GPU (compute capability 9.x), "
            f"not {device.device_kind or device.platform}"
        )
