"""Images in one folder per class, as arrays for a model of patches or as sequences of gray pixels."""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageFile
import PIL.JpegImagePlugin
import PIL.PngImagePlugin
from jaxtyping import Float32, Int32, UInt8

from sympow_jax import config as config_lib
from sympow_jax import spelling
from sympow_jax.data import files, rows, sources

__all__ = ["Images", "Source"]

# Decoders by the first bytes of a file. Pillow's other decoders are not given files of unknown origin.
_DECODERS = {
    b"\x89PNG\r\n\x1a\n": PIL.PngImagePlugin.PngImageFile,
    b"\xff\xd8\xff": PIL.JpegImagePlugin.JpegImageFile,
}
_MAX_PIXELS = 1 << 26  # 200 MB in memory; the header of a small file can claim any size
# Mean and standard deviation of each channel of ImageNet.
_STATISTICS = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# Side of the center crop of held-out images, as a fraction of the shorter side.
_CENTER = 0.875
# Random crop of Szegedy et al. 2015, as in DeiT: fraction of the area, aspect ratio, and the number of draws before
# falling back to a center crop.
_AREA, _RATIO, _CROPS = (0.08, 1.0), (3 / 4, 4 / 3), 10


@dataclasses.dataclass(frozen=True)
class _Image(files.File):
    """A file, whose key is class/name, and the index of its class."""

    label: int


def _class_folders(setting: str, root: str) -> list[str]:
    if not os.path.isdir(root):
        raise ValueError(f"{setting}: there is no folder {root!r}; name one that holds one folder per class")
    with os.scandir(root) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    if len(names) < 2:
        raise ValueError(
            f"{setting}: {root} holds {len(names)} folders; it must hold a folder of images for each of two or more "
            f"classes"
        )
    return names


def _classes(config: config_lib.DataConfig) -> list[str]:
    """Returns the names of the class folders, which must be the same in every path."""
    roots = [("data.paths", root) for root in config.paths]
    roots += [("data.heldout_paths", root) for root in config.heldout_paths]
    expected = None
    for setting, root in roots:
        names = _class_folders(setting, os.path.expanduser(root))
        expected = expected or names
        if names != expected:
            name = sorted(set(names) ^ set(expected))[0]
            where = (root, config.paths[0]) if name in names else (config.paths[0], root)
            raise ValueError(
                f"{setting}: class {name!r} is in {where[0]} but not in {where[1]}; classes must agree"
            )
    return expected or []


def _below(setting: str, paths: tuple[str, ...], classes: list[str]) -> list[_Image]:
    """Returns the images in the class folders of all paths, each once, whatever links lead to it."""
    images: list[_Image] = []
    for root in map(os.path.expanduser, paths):
        for label, name in enumerate(classes):
            folder = os.path.join(root, name)
            inside = files.below(folder, suffix=sources.SOURCES["images"].suffixes)
            if not inside:
                raise ValueError(
                    f"{setting}: the class folder {folder} holds no image; put PNG or JPEG files there, or remove it"
                )
            images += [_Image(file.path, f"{name}/{file.key}", file.size, label) for file in inside]
    unique: dict[str, _Image] = {}
    for location, image in files.located(images):
        other = unique.setdefault(location, image)
        if other.label != image.label:
            raise ValueError(
                f"{setting}: {other.path} and {image.path} are one file in two classes; remove one of them"
            )
    return list(unique.values())


def _unreadable(path: str, error: Exception) -> ValueError:
    return ValueError(f"{path} cannot be read as an image ({spelling.one_line(error)}); replace or remove it")


@contextlib.contextmanager
def _opened(path: str) -> Iterator[PIL.ImageFile.ImageFile]:
    """Yields an image of which only the header has been read."""
    with open(path, "rb") as stream:
        start = stream.read(8)
        stream.seek(0)
        decoders = [decoder for magic, decoder in _DECODERS.items() if start.startswith(magic)]
        if not decoders:
            raise ValueError("its content is neither PNG nor JPEG")
        with decoders[0](stream) as image:
            if image.width * image.height > _MAX_PIXELS:
                raise ValueError(
                    f"it has {image.width} x {image.height} pixels; at most {_MAX_PIXELS} are read"
                )
            yield image


def _size(path: str) -> tuple[int, int]:
    """Returns width and height, reading only the header."""
    try:
        with _opened(path) as image:
            return image.size
    except Exception as error:  # Pillow's decoders raise errors of many kinds
        raise _unreadable(path, error) from error


def _decode(path: str, mode: str) -> PIL.Image.Image:
    try:
        with _opened(path) as image:
            if image.mode.startswith(("I", "F")):
                raise ValueError("it has more than 8 bits a channel")
            return image.convert(mode)
    except Exception as error:  # Pillow's decoders raise errors of many kinds
        raise _unreadable(path, error) from error


def _check_sizes(images: list[_Image], side: int) -> None:
    first = _size(images[0].path)
    for image in images:
        size = _size(image.path)
        if size != first:
            raise ValueError(
                f"images of mixed size: {images[0].path} is {first[0]} x {first[1]} and {image.path} {size[0]} x "
                f"{size[1]}; data.image_tokens reads pixels as they are, so make all {side} x {side}"
            )
    if first != (side, side):
        raise ValueError(
            f"{images[0].path} is {first[0]} x {first[1]}, but data.image_size is {side}; data.image_tokens reads "
            f"pixels as they are, so set it to the size of the images, which must be square"
        )


def _random_crop(image: PIL.Image.Image, side: int, rng: np.random.Generator) -> PIL.Image.Image:
    """Returns a random crop, resized to side x side and mirrored with probability 1/2."""
    width, height = image.size
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
    return image.transpose(PIL.Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else image


def _center_crop(image: PIL.Image.Image, side: int) -> PIL.Image.Image:
    """Returns the center crop, resized to side x side; an image of that size is returned unchanged."""
    width, height = image.size
    if (width, height) == (side, side):
        return image
    cropped = min(width, height) * _CENTER
    left, top = (width - cropped) / 2, (height - cropped) / 2
    return image.resize(
        (side, side), PIL.Image.Resampling.BICUBIC, box=(left, top, left + cropped, top + cropped)
    )


class Images:
    """The training or the held-out images, decoded on access."""

    def __init__(self, images: list[_Image], config: config_lib.DataConfig, *, vary: bool):
        self._paths = [image.path for image in images]
        self._labels = np.array([image.label for image in images], np.int32)
        self._config, self._vary = config, vary
        if config.image_tokens and images:
            _check_sizes(images, config.image_size)

    def __len__(self) -> int:
        return len(self._paths)

    together = property(__len__)  # any order of reading costs the same

    def row(self, index: int, key: tuple[int, ...]) -> rows.Row:
        """Returns image `index`; in training, `key` determines the crop and the mirroring."""
        image = _decode(self._paths[index], "L" if self._config.image_tokens else "RGB")
        read = self._pixels(image) if self._config.image_tokens else self._array(image, key)
        return {"inputs": read, "labels": np.array(self._labels[index])}

    def _pixels(self, image: PIL.Image.Image) -> Int32[np.ndarray, " T"]:
        return np.asarray(image, np.int32).reshape(-1)

    def _array(self, image: PIL.Image.Image, key: tuple[int, ...]) -> Float32[np.ndarray, "H W C"]:
        side = self._config.image_size
        crop = (
            _random_crop(image, side, np.random.default_rng(key)) if self._vary else _center_crop(image, side)
        )
        pixels: UInt8[np.ndarray, "H W C"] = np.asarray(crop).reshape(side, side, -1)
        mean, deviation = (255 * np.array(s, np.float32) for s in _STATISTICS)
        return (pixels - mean) / deviation


class Source:
    """Images, labeled by the rank of their folder's name.

    Rows are `inputs [H, W, 3]`, float32, normalized with ImageNet's mean and deviation. With `data.image_tokens`, they
    are `inputs [H * W]` in gray, int32, from 0 to 255.

    In training, an array is a random crop of 8 to 100 % of the image's area, with an aspect ratio from 3/4 to 4/3,
    mirrored with probability 1/2. Held out, it is the center crop, 7/8 of the shorter side, unless the image has the
    requested size. Both crops are resized with bicubic interpolation. An orientation in the metadata is ignored, and
    channels of 16 bits of a color PNG are rounded to 8.

    Raises:
        ValueError: a folder is missing, a class is empty, or classes differ between folders or from `task.classes`.
            With `data.image_tokens`, the vocabulary is too small or image sizes differ. On access, a file's content is
            not PNG or JPEG, or has more than 2^26 pixels.
    """

    def __init__(self, config: config_lib.DataConfig):
        self._config, self._classes = config, _classes(config)
        self._found = functools.cache(lambda setting, paths: _below(setting, paths, self._classes))

    def _side(self, *, heldout: bool) -> list[_Image]:
        """Returns the training or the held-out images."""
        config = self._config
        images = self._found(*files.side(config, heldout=heldout))
        if config.heldout_paths:
            return images
        keys = [image.key for image in images]
        mask = files.held_out(keys, np.zeros(1, np.int64), config.heldout_fraction).tolist()
        return [image for image, out in zip(images, mask) if out == heldout]

    def examples(self, task: config_lib.TaskConfig, *, vocab_size: int, heldout: bool) -> Images:
        """Returns the training or the held-out images."""
        config, classes = self._config, len(self._classes)
        # Before the classes are counted, because a superfluous folder is most often an empty one.
        images = self._side(heldout=heldout)
        if task.outputs != classes:
            raise ValueError(
                f"task.name is {task.name!r} and task.classes {task.classes}, but {config.paths[0]} holds folders of "
                f"{classes} classes; make them agree"
            )
        if config.image_tokens and vocab_size < 256:
            raise ValueError(
                f"model.vocab_size is {vocab_size}, but pixels have 256 ids; raise it to at least that"
            )
        return Images(images, config, vary=not heldout and not config.image_tokens)

    def describe(self) -> dict[str, Any]:
        """Returns counts, bytes, and a SHA-256 as `digest_of` says; reading all contents would delay the start."""
        train, heldout = (self._side(heldout=side) for side in (False, True))
        return {"classes": len(self._classes)} | sources.described(
            [*train, *heldout],
            len(train),
            len(heldout),
            digest=files.digest([*train, *heldout], lambda _: (), samples=True),
            digest_of="names, sizes and 64 samples of the contents",
        )
