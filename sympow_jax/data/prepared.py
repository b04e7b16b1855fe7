"""Metadata that `prepare` writes next to tokens, compared with the settings of a run."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from sympow_jax import config as config_lib
from sympow_jax.config import serialize
from sympow_jax.data import files, longcrawl64, tokenizer, tokens

__all__ = ["compare"]


def _metadata(config: config_lib.DataConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields names and contents of the files of metadata; tokens that `prepare` did not write have none."""
    if config.source == "tokens":
        for path in (tokens.sidecar(file.path) for file in files.find_all(config, suffix=".bin")):
            if path.is_file():
                yield str(path), serialize.read_object(path)
    elif config.source == "longcrawl64":
        for array in (*config.paths, *config.heldout_paths):
            yield f"{array}/.zattrs", longcrawl64.read_object(array, ".zattrs")


def compare(config: config_lib.Config) -> tuple[config_lib.Config, list[str]]:
    """Compares settings with the metadata of the tokens.

    Returns:
        The settings, with the `data.tokenizer` of the metadata if they have none, and a line for each setting that the
        metadata contradicts, naming the first such file.
    """
    found = list(_metadata(config.data))
    if config.data.tokenizer is None:
        named = (metadata.get("tokenizer") for _, metadata in found)
        name = next((name for name in named if isinstance(name, str)), None)
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer=name))
    data = config.data
    lines: dict[str, str] = {}
    separator = data.document_separator
    if separator is None and data.source == "longcrawl64":
        separator = longcrawl64.DOCUMENT_START
    for name, metadata in found:
        size, end = metadata.get("vocab_size"), metadata.get("separator")
        if isinstance(size, int) and size > config.model.vocab_size:
            lines.setdefault(
                "size",
                f"{name} has ids below {size}, but model.vocab_size is {config.model.vocab_size}; raise it",
            )
        if isinstance(end, int) and end != separator:
            shown = "none" if separator is None else separator
            lines.setdefault(
                "end",
                f"{name} has the separator {end}, but data.document_separator is {shown}; set it to {end}",
            )
        if "tokenizer" not in lines and (problem := _other_tokenizer(data.tokenizer, metadata)):
            lines["tokenizer"] = f"{name} {problem}"
    return config, list(lines.values())


def _other_tokenizer(name: str | None, metadata: dict[str, Any]) -> str:
    stored, fingerprint = metadata.get("tokenizer"), metadata.get("tokenizer_fingerprint")
    # Loaded only under another name, because training needs no tokenizer.
    if name in (None, stored) or not isinstance(stored, str) or not isinstance(fingerprint, str):
        return ""
    try:
        if tokenizer.load(name, setting="data.tokenizer").fingerprint == fingerprint:
            return ""
    except ValueError as error:
        return f"names the tokenizer {stored}, with which data.tokenizer cannot be compared: {error}"
    return f"names the tokenizer {stored}, but data.tokenizer is {name}, whose ids are others; correct it"
