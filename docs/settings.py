"""Writes the reference page of settings from the metadata of their fields: `uv run python docs/settings.py`."""

import dataclasses
import pathlib

from sympow_jax import config
from sympow_jax.config import fields, literals

PAGE = pathlib.Path(__file__).parent / "reference" / "settings.md"
HEAD = (
    "# Settings\n\n"
    "All settings of a run, with their defaults: the fields of [`config.Config`](config.md#a-run). A config file sets "
    "them in Python, the command line with `--config.model.layers=4`, also written `--config.model.layers 4`. Several "
    "values are separated by commas, and `none` is no value. If an item of text has commas, all are quoted, as in "
    '`--config.evaluation.prompts=\'"Hello, world","the"\'`. `docs/settings.py` writes this page from the metadata '
    "of the fields.\n"
)


def render() -> str:
    """Returns the page as Markdown."""
    return HEAD + "".join(_section(group) for group in fields.groups(config.Config))


def _section(group: fields.Group) -> str:
    rows = "".join(_row(setting) for setting in group.settings)
    summary = " ".join((group.kind.__doc__ or "").partition("\n\n")[0].split())
    return f"\n## {group.path}\n\n{summary}\n\n| setting | value | default | meaning |\n|---|---|---|---|\n{rows}"


def _row(setting: fields.Setting) -> str:
    values = [f"`{choice}`" for choice in setting.choices] or setting.form.split("|")
    values += ["`none`"] if setting.optional else []
    default = "" if setting.default is dataclasses.MISSING else f"`{literals.written(setting.default)}`"
    resumable = " May change when a run is resumed." if setting.resumable else ""
    return f"| `{setting.path}` | {', '.join(values)} | {default} | {setting.help}{resumable} |\n"


if __name__ == "__main__":
    PAGE.write_text(render())
