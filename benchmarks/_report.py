"""Result file of a GPU benchmark, rewritten after every measurement."""

import json
import pathlib
import re

__all__ = ["File"]

RESULTS = pathlib.Path(__file__).parent / "results"


class File:
    """Result file `benchmarks/results/<name>-<gpu><suffix>.json`, or the given path.

    On a device other than a GPU nothing is written unless a path is given.
    """

    def __init__(self, name: str, path: pathlib.Path | None, suffix: str):
        self._name, self._path, self._suffix = name, path, suffix

    def path(self, machine: dict) -> pathlib.Path | None:
        """Returns the path for results of a machine, as described by `_contenders.machine`."""
        if self._path is not None or machine.get("platform") != "gpu":
            return self._path
        slug = re.sub(r"[^a-z0-9]+", "-", machine["device"].lower()).strip("-")
        return RESULTS / f"{self._name}-{slug}{self._suffix}.json"

    def write(self, content: dict) -> None:
        """Replaces the content of the file."""
        if (path := self.path(content["machine"])) is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(content, indent=1) + "\n")
