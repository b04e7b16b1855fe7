"""Files as bytes, one document per file; by default the Python interpreter's standard library.

Without held-out paths, the end of each file that `data.paths` names is held out. A file that is found through a folder
or a pattern is on one side as a whole.
"""

import functools
import itertools
import sysconfig
from typing import Any

import numpy as np

from sympow_jax.data import documents, files, sources

# Documents that the end of a named file is cut into, if each has at least a training context of bytes.
_PIECES = 20
# Third-party packages differ between environments; the standard library of a Python release does not.
_PACKAGE_FOLDERS = ("site-packages", "dist-packages")


@functools.lru_cache(maxsize=1)
def standard_library() -> list[files.File]:
    """Returns the Python files of the interpreter's standard library."""
    root = sysconfig.get_paths()["stdlib"]
    return files.below(root, suffix=".py", skip=_PACKAGE_FOLDERS)


class Source(sources.Source):
    """Files as documents of bytes, all of which are held in memory."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._read = functools.cache(lambda file: np.frombuffer(files.read(file.path), np.uint8))

    def open_paths(self, setting: str, paths: tuple[str, ...]) -> list[files.File]:
        """Returns the files, or those of the standard library; raises ValueError if all are empty."""
        matches = files.find(setting, paths) if paths else standard_library()
        if not any(file.size for file in matches):
            raise ValueError(
                f"{setting}: every file is empty ({len(matches)} found); name files that hold text"
            )
        return matches

    def parts(self, *, heldout: bool) -> list[tuple[files.File, int, int]]:
        """Returns file, start and stop of each document of a side, in order, without those that are too short."""
        config, matches = self.config, self.opened(heldout=heldout)
        chosen = files.on_side(config, [file.key for file in matches], np.zeros(1, np.int64), heldout=heldout)
        found = []
        for file, whole in zip(matches, chosen.tolist()):
            bounds = [0, file.size] if whole else []
            if file.named and not config.heldout_paths:
                # The end of a named file is held out, cut into documents.
                tail = int(file.size * config.heldout_fraction)
                bounds = [0, file.size - tail]
                if heldout:
                    least = max(config.context_length, config.shortest_document)
                    pieces = min(_PIECES, max(1, tail // least))
                    bounds = np.linspace(file.size - tail, file.size, pieces + 1).astype(np.int64).tolist()
            found += [(file, start, stop) for start, stop in itertools.pairwise(bounds)]
        return [
            (file, start, stop) for file, start, stop in found if stop - start >= config.shortest_document
        ]

    def side(self, *, heldout: bool) -> documents.Spans:
        """Returns the training or the held-out files, or parts of files."""
        parts = self.parts(heldout=heldout)
        return documents.Spans(
            lambda index: self._read(parts[index][0])[slice(*parts[index][1:])],
            [f"{file.path} from byte {start}" if start else file.path for file, start, _ in parts],
            [np.array([stop - start]) for _, start, stop in parts],
        )

    def describe(self) -> dict[str, Any]:
        """Returns counts of files and bytes, and the SHA-256 of every file's key, size and bytes in order."""
        sides = [self.parts(heldout=side) for side in (False, True)]
        matches = list(dict.fromkeys(file for side in sides for file, _, _ in side))
        cut = not self.config.heldout_paths and any(file.named for file, _, _ in sides[1])
        note = {"heldout_note": "the end of each file that data.paths names"} if cut else {}
        return note | sources.described(
            matches,
            *(self.side(heldout=side).lengths for side in (False, True)),
            digest=files.digest(matches, lambda file: [self._read(file)]),
            digest_of="names, sizes and contents",
        )
