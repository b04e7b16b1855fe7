"""Verdicts of `sympow check`, stored per GPU kind, driver, jax version and kernel sources."""

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import pathlib
import re
import shutil
import subprocess
from collections.abc import Mapping

import jax
import numpy as np
from jax.experimental import multihost_utils

COMMAND = "sympow check"
# Families of kernels, each with its own verdict: trusted if every case that ran its kernels was right.
FAMILIES = ("power_attention", "power_state_square", "power_state_quartic", "power_step")


# Verdicts that the processes of one program agreed on, by device kind.
_agreed: dict[str, dict[str, bool]] = {}


def trusted(family: str, device_kind: str) -> bool:
    """Returns whether a check of this machine found every kernel of a family right.

    With several processes, returns False until `agree` has run: all processes must compile the same program.

    Args:
        family: one of `FAMILIES`.
        device_kind: kind of the GPU that the kernels are for.
    """
    found = _agreed.get(device_kind, {}) if jax.process_count() > 1 else _load(device_kind)
    return found.get(family, False)


def agree(device_kind: str) -> None:
    """Trusts a family only if every process does. A collective: every process must call it."""
    mine = np.array([_load(device_kind).get(family, False) for family in FAMILIES])
    every = multihost_utils.process_allgather(mine).reshape(-1, len(FAMILIES)).all(0)
    _agreed[device_kind] = dict(zip(FAMILIES, every.tolist()))


def advice(device: jax.Device) -> str | None:
    """Returns one line of advice if the GPU has kernels that are not trusted, or None.

    Args:
        device: device of the program.
    """
    if not str(getattr(device, "compute_capability", "")).startswith("9."):
        return None
    absent = [family for family in FAMILIES if not trusted(family, device.device_kind)]
    if not absent:
        return None
    return (
        f"kernels for Hopper GPUs are not used for {', '.join(absent)}: no check found them right on this "
        f"{device.device_kind}; run `{COMMAND} --brief` once, on every machine of the run (a minute on 16 cores)"
    )


def store(device_kind: str, families: Mapping[str, bool], details: Mapping) -> pathlib.Path:
    """Replaces the verdict of this machine and returns its file.

    Args:
        device_kind: kind of the GPU that was checked.
        families: whether each family of kernels is right; an earlier verdict on any other family stays.
        details: everything else worth keeping, as JSON types.
    """
    file = path(device_kind)
    file.parent.mkdir(parents=True, exist_ok=True)
    content = {"machine": machine(device_kind), "families": _load(device_kind) | dict(families), **details}
    # Replace atomically: a reader sees the old verdict or the new one, never a partial one.
    partial = file.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.replace(file)
    _load.cache_clear()
    return file


def path(device_kind: str) -> pathlib.Path:
    """Returns the file of this machine's verdict, in the user's cache directory; it need not exist."""
    root = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    identity = "-".join(machine(device_kind).values())
    name = re.sub(r"[^A-Za-z0-9.]+", "-", identity).strip("-")
    return pathlib.Path(root, "sympow-jax", "kernels", f"{name}.json")


def machine(device_kind: str) -> dict[str, str]:
    """Returns the identity that a verdict is valid for: GPU kind, driver, jax with its compiler, and kernel sources."""
    return {
        "device": device_kind,
        "driver": driver_version() or "unknown",
        "jax": "-".join(_versions()),
        "kernels": _kernels_digest(),
    }


@functools.cache
def driver_version() -> str | None:
    """Returns the version of the NVIDIA driver, or None if there is none."""
    module = pathlib.Path("/proc/driver/nvidia/version")
    if module.exists() and (found := re.search(r"\b\d{3}\.\d+(\.\d+)?\b", module.read_text())):
        return found[0]
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
    except (subprocess.SubprocessError, OSError):
        return None
    return next(iter(done.stdout.split()), None)


def _versions() -> list[str]:
    """Returns the version of jax and of its and NVIDIA's installed packages that compile kernels."""
    found = [jax.__version__]
    for package in (
        "jaxlib",
        "jax-cuda13-plugin",
        "jax-cuda12-plugin",
        "nvidia-cuda-nvcc",
        "nvidia-cuda-nvcc-cu12",
    ):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(importlib.metadata.version(package))
    return found


@functools.cache
def _kernels_digest() -> str:
    """Returns a digest of the kernels' sources, which in a checkout change without a release."""
    digest = hashlib.sha256()
    root = pathlib.Path(__file__).parents[1]
    for file in sorted(root.rglob("*.py")):
        digest.update(file.relative_to(root).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()[:12]


@functools.cache
def _load(device_kind: str) -> dict[str, bool]:
    try:
        families = json.loads(path(device_kind).read_text())["families"]
    except (OSError, ValueError, KeyError, TypeError, RuntimeError):
        return {}  # no verdict for this machine, an unreadable one, or no home directory
    if not isinstance(families, dict):
        return {}
    return {name: found is True for name, found in families.items()}
