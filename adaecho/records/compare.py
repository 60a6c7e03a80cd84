"""Is this the run (or the search) that a folder holds? Differences as lines a person can act on."""

from typing import Any

_ABSENT = object()


def differences(recorded: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """One line per key whose value differs, nested keys dotted: ``echo.factor: 2 in the folder, 4 now``."""
    old, new = dict(_flat(recorded)), dict(_flat(now))
    return [
        f"{key}: {_show(old.get(key, _ABSENT))} in the folder, {_show(new.get(key, _ABSENT))} now"
        for key in [*old, *(key for key in new if key not in old)]
        if old.get(key, _ABSENT) != new.get(key, _ABSENT)
    ]


def smaller_budgets(recorded: dict[str, Any], now: dict[str, Any], keys: tuple[str, ...]) -> list[str]:
    """One line per budget that is below the recorded one; null is no limit."""
    pairs = [(key, recorded.get(key), now.get(key)) for key in keys]
    return [
        f"{key}: {_show(old)} in the folder, {_show(new)} now (a budget can only grow)"
        for key, old, new in pairs
        if new is not None and (old is None or new < old)
    ]


def _flat(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    items: list[tuple[str, Any]] = []
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            items += _flat(value, f"{prefix}{key}.")
        else:
            items.append((f"{prefix}{key}", value))
    return items


def _show(value: Any) -> str:
    return "absent" if value is _ABSENT else "null" if value is None else str(value)
