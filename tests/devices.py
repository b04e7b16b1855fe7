"""The CPU devices of the tests, two for each of four axes; the product sees one unless a test asks for more."""

import contextlib
from collections.abc import Iterator

import jax

COUNT = 16
_FUNCTIONS = {
    name: getattr(jax, name) for name in ("devices", "local_devices", "device_count", "local_device_count")
}


@contextlib.contextmanager
def seen(count: int) -> Iterator[None]:
    """Has `jax.devices` and its like name the first `count` devices; what takes all devices by default takes these.

    `jax.make_mesh` is not affected: it makes a mesh of as many devices as its shape needs.
    """
    before = {name: getattr(jax, name) for name in _FUNCTIONS}
    for name, function in _FUNCTIONS.items():
        if name.endswith("count"):
            setattr(jax, name, lambda *args, _all=function, **options: min(count, _all(*args, **options)))
        else:
            setattr(jax, name, lambda *args, _all=function, **options: _all(*args, **options)[:count])
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(jax, name, function)
