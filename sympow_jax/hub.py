"""Download of weights and tokenizers from the Hugging Face Hub."""

import os
import pathlib
import re
from collections.abc import Sequence

from sympow_jax import extras

_SCHEME = "hf://"
_NAME = re.compile(r"(?P<repo>[^/@]+/[^/@]+)(@(?P<revision>[^@]+))?")
# Names of files to download. Of a model: weights, settings and tokenizers, but no pickles.
WEIGHTS = ("*.json", "*.safetensors", "tokenizer.model", "merges.txt", "chat_template.jinja")
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Returns whether `local_path` downloads a path."""
    return os.fspath(path).startswith(_SCHEME)


def local_path(path: str | os.PathLike[str], patterns: Sequence[str]) -> pathlib.Path:
    """Returns a path, or the folder with the downloaded files of `hf://ORG/NAME` or `hf://ORG/NAME@REVISION`.

    Args:
        path: path or name.
        patterns: files of the repository to download, `WEIGHTS` or `TOKENIZER`.

    Files are kept in the cache of the package `huggingface_hub`, which is the extra `hub`. Its variables, such as
    HF_HOME and HF_TOKEN, apply.

    Raises:
        ValueError: the name has another form, the package is not installed, or the download fails.
    """
    name = os.fspath(path)
    if not is_remote(name):
        return pathlib.Path(name)
    match = _NAME.fullmatch(name.removeprefix(_SCHEME))
    if match is None:
        raise ValueError(f"{name} is no name of a repository; write hf://ORG/NAME or hf://ORG/NAME@REVISION")
    with extras.required("hub", name):
        import huggingface_hub
    try:
        folder = huggingface_hub.snapshot_download(
            match["repo"], revision=match["revision"], allow_patterns=list(patterns)
        )
    except Exception as error:  # of the library, of the HTTP client below it, or of the system
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise ValueError(f"cannot download {name}: {reason}") from error
    return pathlib.Path(folder)
