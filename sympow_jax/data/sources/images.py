"""Images in one folder per class, as arrays for a model of patches or as sequences of gray pixels."""

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import PIL.Image

from sympow_jax import config as config_lib
from sympow_jax import spelling
from sympow_jax.data import files, rows, sources

# Mean and standard deviation of each channel of ImageNet.
_STATISTICS = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# Side of the center crop of held-out images, as a fraction of the shorter side.
_CENTER = 0.875
# Random crop of Szegedy et al. 2015, as in DeiT: fraction of the area, aspect ratio, and the number of draws before
# falling back to a center crop.
_AREA, _RATIO, _CROPS = (0.08, 1.0), (3 / 4, 4 / 3), 10


def _classes(config: config_lib.DataConfig) -> list[str]:
    """Returns the names of the class folders, which must be the same in every path."""
    expected: list[str] = []
    for setting, paths in (("data.paths", config.paths), ("data.heldout_paths", config.heldout_paths)):
        for root in paths:
            path = os.path.expanduser(root)
            if not os.path.isdir(path):
                raise ValueError(
                    f"{setting}: there is no folder {path!r}; name one with one folder per class"
                )
            with os.scandir(path) as entries:
                names = sorted(x.name for x in entries if x.is_dir() and not x.name.startswith("."))
            if len(names) < 2:
                raise ValueError(
                    f"{setting}: {path} holds {len(names)} folders; it must hold a folder of images for each of two "
                    f"or more classes"
                )
            expected = expected or names
            if other := sorted(set(names) ^ set(expected)):
                has, lacks = (root, config.paths[0]) if other[0] in names else (config.paths[0], root)
                raise ValueError(
                    f"{setting}: class {other[0]!r} is in {has} but not in {lacks}; classes must agree"
                )
    return expected


def _class_of(file: files.File) -> str:
    return file.key.partition("/")[0]


@contextlib.contextmanager
def _opened(path: str) -> Iterator[PIL.Image.Image]:
    """Yields an image of which only the header has been read; errors of decoding name the file."""
    try:
        # Pillow's other decoders are not given files of unknown origin.
        with PIL.Image.open(path, formats=("PNG", "JPEG")) as image:
            yield image
    except Exception as error:  # Pillow's decoders raise errors of many kinds
        unknown = isinstance(error, PIL.UnidentifiedImageError)
        reason = "it is neither PNG nor JPEG" if unknown else spelling.one_line(error)
        raise ValueError(f"{path} cannot be read as an image ({reason}); replace or remove it") from error


def _crop(image: PIL.Image.Image, side: int, rng: np.random.Generator | None) -> PIL.Image.Image:
    """Returns a crop, resized to side x side: random and mirrored with probability 1/2, or the center without `rng`."""
    width, height = image.size
    if rng is None:
        if (width, height) == (side, side):
            return image
        w = h = min(width, height) * _CENTER
        left, top = (width - w) / 2, (height - h) / 2
    else:
        for _ in range(_CROPS):
            area = width * height * rng.uniform(*_AREA)
            ratio = np.exp(rng.uniform(*np.log(_RATIO)))
            w, h = round(np.sqrt(area * ratio)), round(np.sqrt(area / ratio))
            if 0 < w <= width and 0 < h <= height:
                left, top = rng.integers(width - w, endpoint=True), rng.integers(height - h, endpoint=True)
                break
        else:
            w, h = min(width, round(height * _RATIO[1])), min(height, round(width / _RATIO[0]))
            left, top = (width - w) // 2, (height - h) // 2
    image = image.resize((side, side), PIL.Image.Resampling.BICUBIC, box=(left, top, left + w, top + h))
    if rng is not None and rng.random() < 0.5:
        image = image.transpose(PIL.Image.Transpose.FLIP_LEFT_RIGHT)
    return image


class Source(sources.Source):
    """Images, labeled by the rank of their folder's name.

    Rows are `inputs [H, W, 3]`, float32, normalized with ImageNet's mean and deviation. With `data.image_tokens`, they
    are `inputs [H * W]` in gray, int32, from 0 to 255.

    In training, an array is a random crop of 8 to 100 % of the image's area, with an aspect ratio from 3/4 to 4/3,
    mirrored with probability 1/2. Held out, it is the center crop, 7/8 of the shorter side, unless the image has the
    requested size. Both are resized with bicubic interpolation. An orientation in the metadata is ignored.

    Raises:
        ValueError: a folder is missing, a class is empty, or classes differ between folders or from `task.classes`.
            With `data.image_tokens`, the vocabulary is too small or image sizes differ. On access, a file's content is
            not PNG or JPEG, or has more than Pillow's limit of pixels.
    """

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._classes = _classes(self.config)

    def open_paths(self, setting: str, paths: tuple[str, ...]) -> list[files.File]:
        """Returns the images of all paths, with keys class/name, each once, whatever links lead to it."""
        unique: dict[str, files.File] = {}
        for root in map(os.path.expanduser, paths):
            for name in self._classes:
                folder = os.path.join(root, name)
                inside = files.below(folder, suffix=self.config.kind.suffixes)
                if not inside:
                    raise ValueError(
                        f"{setting}: the class folder {folder} holds no image; add PNG or JPEG files, or remove it"
                    )
                for location, file in files.located(inside):
                    image = dataclasses.replace(file, key=f"{name}/{file.key}")
                    other = unique.setdefault(location, image)
                    if _class_of(other) != name:
                        raise ValueError(
                            f"{setting}: {other.path} and {file.path} are one file in two classes; remove one"
                        )
        return list(unique.values())

    def _chosen(self, *, heldout: bool) -> list[files.File]:
        """Returns the training or the held-out images."""
        images = self.opened(heldout=heldout)
        keys = [file.key for file in images]
        chosen = files.on_side(self.config, keys, np.zeros(1, np.int64), heldout=heldout)
        return list(itertools.compress(images, chosen))

    def side(self, *, heldout: bool) -> rows.Labeled:
        """Returns the training or the held-out images."""
        config, task, classes, side = self.config, self.task, len(self._classes), self.config.image_size
        # Before the classes are counted, because a superfluous folder is most often an empty one.
        images = self._chosen(heldout=heldout)
        if task.outputs != classes:
            raise ValueError(
                f"task.name is {task.name!r} and task.classes {task.classes}, but {config.paths[0]} holds folders of "
                f"{classes} classes; make them agree"
            )
        if config.image_tokens:
            if self.vocab_size < 256:
                raise ValueError(f"model.vocab_size is {self.vocab_size}, but pixels have 256 ids; raise it")
            for file in images:
                with _opened(file.path) as opened:
                    size = opened.size
                if size != (side, side):
                    raise ValueError(
                        f"{file.path} is {size[0]} x {size[1]}, but data.image_size is {side}; for "
                        f"data.image_tokens, all images must be squares of that size"
                    )

        def row(index: int, key: tuple[int, ...]) -> rows.Row:
            file = images[index]
            with _opened(file.path) as opened:
                if opened.mode.startswith(("I", "F")):
                    raise ValueError("it has more than 8 bits a channel")
                image = opened.convert("L" if config.image_tokens else "RGB")
            inputs: np.ndarray
            if config.image_tokens:
                inputs = np.asarray(image, np.int32).reshape(-1)
            else:
                # In training, the key determines the crop and the mirroring.
                crop = _crop(image, side, None if heldout else np.random.default_rng(key))
                mean, deviation = (255 * np.array(s, np.float32) for s in _STATISTICS)
                inputs = (np.asarray(crop) - mean) / deviation
            return {"inputs": inputs, "labels": np.array(labels[_class_of(file)], np.int32)}

        labels = {name: label for label, name in enumerate(self._classes)}
        return rows.Labeled(len(images), row)

    def describe(self) -> dict[str, Any]:
        """Returns counts, bytes, and a SHA-256 as `digest_of` says; reading all contents would delay the start."""
        sides = [self._chosen(heldout=side) for side in (False, True)]
        matches = [*sides[0], *sides[1]]
        return {"classes": len(self._classes)} | sources.described(
            matches,
            *map(len, sides),
            digest=files.digest(matches, lambda _: (), samples=True),
            digest_of="names, sizes and 64 samples of the contents",
        )
