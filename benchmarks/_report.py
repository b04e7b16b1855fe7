"""Where a benchmark on a GPU writes what it has measured so far."""

import json
import pathlib
import re

__all__ = ["File"]

RESULTS = pathlib.Path(__file__).parent / "results"


class File:
    """benchmarks/results/<name>-<gpu><suffix>.json, or the given path; none on another device unless one is given."""

    def __init__(self, name: str, path: pathlib.Path | None, suffix: str):
        self._name, self._path, self._suffix = name, path, suffix

    def path(self, machine: dict) -> pathlib.Path | None:
        """Of results of a machine, as `_contenders.machine` describes it."""
        if self._path is not None or machine.get("platform") != "gpu":
            return self._path
        slug = re.sub(r"[^a-z0-9]+", "-", machine["device"].lower()).strip("-")
        return RESULTS / f"{self._name}-{slug}{self._suffix}.json"

    def write(self, content: dict) -> None:
        """Replaces what the file holds."""
        if (path := self.path(content["machine"])) is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(content, indent=1) + "\n")
