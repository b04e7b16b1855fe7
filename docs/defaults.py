"""Griffe extension: the default of a setting is that of `fields.setting`."""

from typing import Any

import griffe


class Defaults(griffe.Extension):
    """Replaces the calls of `fields.setting` by their first argument."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Reads the value of one attribute."""
        if isinstance(attr.value, griffe.ExprCall) and str(attr.value.function) == "fields.setting":
            attr.value = attr.value.arguments[0]
