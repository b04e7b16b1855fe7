"""Random inputs, and random changes to good ones."""

import json
import pathlib
import random
from typing import Any

# Values that break what does not expect them.
HOSTILE: tuple[Any, ...] = (
    None,
    True,
    False,
    "",
    "x",
    "é\u2028\n\x00",
    "x" * 100_000,
    "..",
    "/dev/zero",
    [],
    {},
    [[]],
    {"a": {}},
    ["x"] * 1000,
    list(range(10_000)),
    {str(number): 0 for number in range(1000)},
    0,
    -1,
    1,
    2,
    3,
    1.0,
    0.5,
    -0.0,
    1e-300,
    1e300,
    float("nan"),
    float("inf"),
    2**31,
    2**32,
    2**63,
    2**64,
    10**9,
    10**30,
)
TEXTS: tuple[str, ...] = (
    "",
    "none",
    "true",
    "nan",
    "inf",
    "-inf",
    "1e400",
    "-1",
    "0",
    "1",
    "2",
    "7",
    "1e9",
    "9" * 5000,
    "1_000",
)
TEXTS += ("()", "(", "[", ",", ",,", "1,2", "'", '"', "'a','b'", "((((", "x" * 100_000, "é", "\n", "*", "a=b")
TEXTS += (
    "1000000*softmax",
    "softmax,linear",
    "conformal",
    "0*softmax",
    "3*",
    "*=1",
    "x=nan",
    "*=-1",
    "/dev/zero",
)
_LEVELS = (40, 1000, 100_000)


def json_text(values: Any, source: random.Random) -> str:
    """Returns a JSON value as text, after one to three changes to it, of which a few are to the text."""
    for _ in range(source.randint(1, 3)):
        values = changed(values, source)
    text = json.dumps(values)
    match source.randrange(20):
        case 0:
            return text[: source.randrange(len(text) + 1)]
        case 1:
            levels = source.choice(_LEVELS)
            begin, end = source.choice((("[", "]"), ('{"a":', "}")))
            deep = begin * levels + "0" + end * levels
            return text.replace(source.choice(("0", "1", "true", '"')), deep, 1)
        case 2:
            return "9" * source.choice((100, 10_000))
        case 3:
            at = source.randrange(len(text) + 1)
            return text[:at] + source.choice('{}[]",:\x00-e9') + text[at:]
    return text


def changed(value: Any, source: random.Random) -> Any:
    """Returns a JSON value in which one random part is replaced, removed or added."""
    if isinstance(value, dict) and value and source.random() < 0.9:
        name = source.choice(list(value))
        match source.randrange(10):
            case 0:
                return {key: part for key, part in value.items() if key != name}
            case 1:
                return value | {
                    source.choice(("x", "", "layers", "a.b", "x" * 10_000)): source.choice(HOSTILE)
                }
        return value | {name: changed(value[name], source)}
    if isinstance(value, list) and value and source.random() < 0.9:
        index = source.randrange(len(value))
        part = [] if source.random() < 0.1 else [changed(value[index], source)]
        return [*value[:index], *part, *value[index + 1 :]]
    if isinstance(value, int) and source.random() < 0.2:
        return value + source.choice((-1, 1))
    return source.choice(HOSTILE)


def changed_bytes(content: bytes, source: random.Random) -> bytes:
    """Returns bytes after a few random changes: flipped bits, cuts, and parts that are inserted, repeated or zero."""
    changing = bytearray(content)
    for _ in range(source.randint(1, 4)):
        if not changing:
            break
        # Half of the changes are near the beginning, where headers are.
        length = source.choice((len(changing), min(len(changing), 256)))
        at = source.randrange(length)
        match source.randrange(6):
            case 0 | 1:
                changing[at] ^= 1 << source.randrange(8)
            case 2:
                del changing[at:]
            case 3:
                changing[at : at + source.randint(1, 16)] = source.randbytes(source.randint(0, 16))
            case 4:
                size = source.choice((1, 2, 4, 8))
                changing[at : at + size] = source.choice((b"\xff", b"\x00", b"\x7f")) * size
            case 5:
                del changing[at : at + source.randint(1, 64)]
    return bytes(changing)


def write_tree(files: dict[str, bytes], folder: pathlib.Path) -> None:
    """Writes files by their names relative to a folder."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def read_tree(folder: pathlib.Path) -> dict[str, bytes]:
    """Returns the files below a folder by their names relative to it."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def changed_tree(files: dict[str, bytes], source: random.Random) -> dict[str, bytes]:
    """Returns files of which one is changed or missing; one of JSON, as JSON in most cases."""
    name = source.choice(list(files))
    rest = {key: content for key, content in files.items() if key != name}
    if source.random() < 0.05:
        return rest
    try:
        values = json.loads(files[name]) if source.random() < 0.8 else None
    except ValueError:
        values = None
    if values is None:
        return rest | {name: changed_bytes(files[name], source)}
    return rest | {name: json_text(values, source).encode()}
