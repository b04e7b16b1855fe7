"""Checks of settings, whose errors name the setting."""

__all__ = ["require_at_least", "require_choice", "require_fraction"]


def require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(choices)}")


def require_at_least(least: float, **values: float) -> None:
    for name, value in values.items():
        if value < least:
            raise ValueError(f"{name} is {value}; it must be at least {least}")


def require_fraction(**values: float) -> None:
    for name, value in values.items():
        if not 0 <= value < 1:
            raise ValueError(f"{name} is {value}; it must lie in [0, 1)")
