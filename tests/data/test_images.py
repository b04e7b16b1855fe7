"""Tests of images in class folders: reading, cropping, and rejected files."""

import io
import os
import pathlib
import zlib

import numpy as np
import PIL.Image
import pytest

from sympow_jax import config as config_lib
from sympow_jax import data
from sympow_jax.data import sources
from tests.data import builders

TASK = config_lib.TaskConfig(name="classification", classes=2)
MEAN, DEVIATION = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])


def settings(root, **changes) -> config_lib.DataConfig:
    return builders.data_config(
        **{"source": "images", "paths": (str(root),), "heldout_fraction": 0.0, "image_size": 8, **changes}
    )


def pixel_settings(root, **changes) -> config_lib.DataConfig:
    return settings(root, **{"image_tokens": True, "context_length": 64, **changes})


def encoded(pixels: np.ndarray, kind: str = "png") -> bytes:
    stream = io.BytesIO()
    PIL.Image.fromarray(pixels).save(stream, kind)
    return stream.getvalue()


def random_pixels(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)


def write(root: pathlib.Path, contents: dict[str, np.ndarray | bytes]) -> pathlib.Path:
    encode = {name: x if isinstance(x, bytes) else encoded(x) for name, x in contents.items()}
    builders.write_files(root, encode)
    return root


def opened(config, *, vocab_size=256):
    return data.train_dataset(config, task=TASK, vocab_size=vocab_size)


@pytest.fixture
def root(tmp_path):
    """Writes five gray 8 x 8 images in two classes, one of them nested, and files to ignore."""
    grays = {
        name: random_pixels(i, 8, 8) for i, name in enumerate(("cat/a", "cat/b", "cat/c/d", "ape/e", "ape/f"))
    }
    passed = {"notes.txt": b"a", "cat/list.csv": b"b", ".hidden/x.png": b"c", "ape/.x.png": b"d"}
    return write(tmp_path / "train", {f"{name}.png": pixels for name, pixels in grays.items()} | passed)


def test_pixels_as_tokens(root, tmp_path):
    dataset = opened(pixel_settings(root))
    rows = [dataset[i] for i in range(5)]
    # Classes are the folders in the order of their names.
    assert {tuple(row["inputs"].tolist()): row["labels"].item() for row in rows} == {
        tuple(random_pixels(i, 8, 8).reshape(-1).tolist()): label for i, label in enumerate((1, 1, 1, 0, 0))
    }
    assert rows[0].keys() == {"inputs", "labels"}
    assert rows[0]["inputs"].dtype == rows[0]["labels"].dtype == np.int32
    color = np.zeros((8, 8, 3), np.uint8)
    color[..., 0], color[..., 1] = 200, 100
    write(tmp_path / "colors", {"a/x.png": color, "b/x.png": color})
    row = opened(pixel_settings(tmp_path / "colors"))[0]
    # ITU-R 601: 0.299 R + 0.587 G + 0.114 B.
    assert set(row["inputs"].tolist()) <= {118, 119}
    with builders.refused(r"model\.vocab_size is 255, but pixels have 256 ids"):
        opened(pixel_settings(root), vocab_size=255)


def heldout_image(folder: pathlib.Path, content: np.ndarray | bytes, name: str = "x.png") -> np.ndarray:
    """Returns the array of a held-out image, which is not cropped at random."""
    for side in ("train", "heldout"):
        write(folder / side, {f"{label}/{name}": content for label in ("a", "b")})
    config = settings(folder / "train", heldout_paths=(str(folder / "heldout"),))
    return sources.open_source(config, TASK, vocab_size=1).side(heldout=True).row(0, (0,))["inputs"]


def ramps(height: int, width: int) -> np.ndarray:
    """Returns an image whose red grows from 0 to 255 along the width, and green along the height."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[..., 0] = np.round((np.arange(width) + 0.5) / width * 255)
    pixels[..., 1] = np.round((np.arange(height) + 0.5) / height * 255)[:, None]
    return pixels


def boxes(row) -> tuple[float, float, float, float]:
    """Returns left, right, top and bottom of a crop of `ramps`, as fractions of the image.

    Left exceeds right if the crop is mirrored.
    """
    pixels = row["inputs"] * DEVIATION + MEAN
    side = len(pixels)
    # Slopes from the inside only: the filter stops at the edges of the image.
    inside = slice(side // 4, 3 * side // 4)
    places = (np.arange(side) + 0.5) / side
    ends = []
    for values in (pixels[..., 0].mean(axis=0), pixels[..., 1].mean(axis=1)):
        slope, start = np.polyfit(places[inside], values[inside], 1)
        ends += [start, start + slope]
    return tuple(ends)


def test_the_center_of_held_out_images(tmp_path):
    write(tmp_path, {"a/x.png": ramps(120, 200), "b/x.png": ramps(120, 200)})
    config = settings(tmp_path, heldout_paths=(str(tmp_path),), image_size=32)
    (batch,) = data.HeldoutData(config, TASK, vocab_size=1).batches(2)
    left, right, top, bottom = boxes({"inputs": batch["inputs"][0]})
    # 7/8 of 120 is 105 of both sides.
    np.testing.assert_allclose((left, right), ((200 - 105) / 400, (200 + 105) / 400), atol=0.01)
    np.testing.assert_allclose((top, bottom), (1 / 16, 15 / 16), atol=0.01)
    assert batch["labels"].tolist() == [0, 1]


def test_random_crops(tmp_path):
    write(tmp_path, {"a/x.png": ramps(120, 200), "b/x.png": ramps(120, 200)})
    config = settings(tmp_path, image_size=32)
    dataset, again = (opened(config) for _ in range(2))
    result = []
    for i in range(200):
        row = dataset[i]
        np.testing.assert_array_equal(again[i]["inputs"], row["inputs"])
        result.append(boxes(row))
    left, right, top, bottom = np.array(result).T
    assert abs(np.mean(left > right) - 0.5) < 4 * np.sqrt(0.25 / 200)
    left, right = np.minimum(left, right), np.maximum(left, right)
    assert min(left.min(), top.min()) > -0.02
    assert max(right.max(), bottom.max()) < 1.02
    width, height = (right - left) * 200, (bottom - top) * 120
    area, ratio = width * height / 24_000, width / height
    assert 0.07 < area.min() < 0.15
    # The square that fits is 60 % of the image, the widest part that fits 80 %.
    assert 0.6 < area.max() < 0.83
    assert 0.72 < ratio.min() < 0.8
    assert 1.25 < ratio.max() < 1.38
    assert left.std() > 0.1
    assert top.std() > 0.05
    reseeded = opened(settings(tmp_path, image_size=32, seed=1))
    assert any(np.any(reseeded[i]["inputs"] != dataset[i]["inputs"]) for i in range(4))


def test_random_crops_of_narrow_images(tmp_path):
    images = {"a/x.png": ramps(4, 400), "b/x.png": ramps(400, 4), "a/y.png": random_pixels(0, 20, 7)}
    dataset = opened(settings(write(tmp_path, images)))
    assert {dataset[i]["inputs"].shape for i in range(20)} == {(8, 8, 3)}
    assert all(np.isfinite(dataset[i]["inputs"]).all() for i in range(20))


def test_held_out_images_of_any_size_and_kind(tmp_path):
    pixels = random_pixels(0, 8, 8, 3)
    array = heldout_image(tmp_path, pixels)
    assert (array.shape, array.dtype) == ((8, 8, 3), np.float32)
    np.testing.assert_allclose(array * DEVIATION + MEAN, pixels / 255, atol=1e-6)
    assert heldout_image(tmp_path / "others", random_pixels(0, 20, 7)).shape == (8, 8, 3)
    pixels = np.full((8, 8, 3), (200, 40, 90), np.uint8)
    for name in ("x.PNG", "x.png", "x.JPEG", "x.jpg"):
        kind = "png" if name.lower().endswith("png") else "jpeg"
        array = heldout_image(tmp_path / name, encoded(pixels, kind), name)
        np.testing.assert_allclose(array * DEVIATION + MEAN, pixels / 255, atol=4 / 255)


def test_files_that_are_no_images_are_named_when_they_are_read(tmp_path, recwarn):
    whole = encoded(random_pixels(0, 64, 64, 3))
    large = bytearray(encoded(random_pixels(0, 8, 8)))
    large[16:24] = (20_000).to_bytes(4, "big") * 2  # width and height in the header,
    large[29:33] = zlib.crc32(large[12:29]).to_bytes(4, "big")  # whose checksum holds
    deep = encoded((random_pixels(0, 8, 8).astype(np.uint16) << 8) + 7)
    others = [encoded(random_pixels(0, 8, 8, 3), kind) for kind in ("bmp", "gif", "tiff", "webp")]
    for content, message in (
        *((other, r"it is neither PNG nor JPEG\); replace") for other in others),
        (bytes(large), r"400000000 pixels\) exceeds limit"),
        (whole[: len(whole) // 2], ""),
        (deep, "it has more than 8 bits a channel"),
    ):
        write(tmp_path, {"a/x.png": content, "b/x.png": content})
        dataset = opened(settings(tmp_path))
        with builders.refused(rf"x\.png cannot be read as an image \(.*{message}"):
            dataset[0]
    assert not [
        x for x in recwarn if x.category is not ResourceWarning
    ]  # of files that other tests left open


def test_fraction_held_out_and_description(tmp_path):
    pixels = encoded(random_pixels(0, 8, 8))
    write(tmp_path, {f"{name}/{i}.png": pixels for name in "ab" for i in range(200)})
    config = pixel_settings(tmp_path, heldout_fraction=0.1)
    description = data.describe(config)
    assert (description["classes"], description["files"], description["bytes"]) == (2, 400, 400 * len(pixels))
    assert description["examples"] + description["heldout_examples"] == 400
    assert abs(description["heldout_examples"] - 40) < 4 * np.sqrt(400 * 0.09)
    batches = list(data.HeldoutData(config, TASK, vocab_size=256).batches(16))
    assert sum((batch["labels"] != -1).sum() for batch in batches) == description["heldout_examples"]
    assert data.describe(config) == description
    write(tmp_path, {f"a/{i}.png": encoded(random_pixels(0, 8, 8)[::-1]) for i in range(100)})
    assert os.path.getsize(tmp_path / "a" / "7.png") == len(pixels)
    assert data.describe(config)["digest"] != description["digest"]
    description = data.describe(config)
    os.remove(tmp_path / "a" / "7.png")
    assert data.describe(config)["digest"] != description["digest"]


def test_two_roots_and_held_out_folders(root, tmp_path):
    other = write(
        tmp_path / "more", {"cat/x.png": random_pixels(9, 8, 8), "ape/y.png": random_pixels(8, 8, 8)}
    )
    config = pixel_settings(root, paths=(str(root), str(other)), heldout_paths=(str(other),))
    assert data.describe(config)["examples"] == 7
    (batch,) = data.HeldoutData(config, TASK, vocab_size=256).batches(3)
    assert batch["labels"].tolist() == [0, 1, -1]
    np.testing.assert_array_equal(batch["inputs"][0], random_pixels(8, 8, 8).reshape(-1))


@pytest.mark.parametrize(
    ("written", "changes", "message"),
    [
        ({"ape/g.png": random_pixels(0, 8, 7)}, {}, r"g\.png is 7 x 8, but data\.image_size is 8; .* must"),
        ({"ape/g.png": b"none"}, {}, r"g\.png cannot be read as an image \(it is neither PNG nor"),
        ({"dog/list.txt": b"x"}, {}, r"the class folder .*/dog holds no image; add PNG or JPEG"),
        ({"dog/x.png": random_pixels(0, 8, 8)}, {}, r"task\.classes 2, but .* holds folders of 3 classes"),
        ({}, {"image_size": 16, "context_length": 256}, r"e\.png is 8 x 8, but data\.image_size is 16; .*"),
        ({}, {"context_length": 32}, r"data\.context_length is 32, but the pixels of data\.image_size 8"),
        ({}, {"paths": ()}, r"data\.paths is empty; source 'images' needs"),
        ({}, {"paths": ("train/cat",)}, r"data\.paths: train/cat holds 1 folders; it must hold a folder of"),
        ({}, {"heldout_paths": ("held",)}, r"data\.heldout_paths: class 'ape' is in .*train but not in"),
    ],
)
def test_bad_folders(root, tmp_path, monkeypatch, written, changes, message):
    monkeypatch.chdir(tmp_path)
    write(root, written)
    write(tmp_path / "held", {"cat/x.png": random_pixels(0, 8, 8), "dog/x.png": random_pixels(0, 8, 8)})
    with builders.refused(message):
        opened(pixel_settings(root, **changes))


def test_an_image_is_one_whatever_links_lead_to_it(root, tmp_path):
    (root / "cat" / "link.png").symlink_to("a.png")
    (tmp_path / "again").symlink_to(root)
    config = settings(root, paths=(str(root), str(tmp_path / "again")))
    assert data.describe(config)["examples"] == 5
    (root / "ape" / "link.png").symlink_to(root / "cat" / "b.png")
    with builders.refused(r"ape/link\.png and .*cat/b\.png are one file in two classes;"):
        data.describe(config)
