"""Download of weights from the Hugging Face Hub."""

import importlib
import os
import pathlib
import re

__all__ = ["local_path"]

_SCHEME = "hf://"
_NAME = re.compile(r"(?P<repo>[^/@]+/[^/@]+)(@(?P<revision>[^@]+))?")
# Weights, settings and tokenizers, but no pickles.
_PATTERNS = ["*.json", "*.safetensors", "tokenizer.model"]


def local_path(path: str | os.PathLike[str]) -> pathlib.Path:
    """Returns a path, or the folder with the downloaded files of `hf://ORG/NAME` or `hf://ORG/NAME@REVISION`.

    Files are kept in the cache of the package `huggingface_hub`, which is the extra `hub`. Its variables, such as
    HF_HOME and HF_TOKEN, apply.

    Raises:
        ValueError: the name has another form, the package is not installed, or the download fails.
    """
    name = os.fspath(path)
    if not name.startswith(_SCHEME):
        return pathlib.Path(name)
    match = _NAME.fullmatch(name.removeprefix(_SCHEME))
    if match is None:
        raise ValueError(f"{name} is no name of a model; write hf://ORG/NAME or hf://ORG/NAME@REVISION")
    try:
        library = importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise ValueError(
            f"{name} needs the package 'huggingface_hub', which is not installed; install the optional extra with "
            f"pip install 'sympow-jax[hub]', or download the files yourself"
        ) from error
    try:
        folder = library.snapshot_download(
            match["repo"], revision=match["revision"], allow_patterns=_PATTERNS
        )
    except Exception as error:  # of the library, of the HTTP client below it, or of the system
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise ValueError(f"cannot download {name}: {reason}") from error
    return pathlib.Path(folder)
