"""Write docs/configuration.md, the table of config keys, from the comments of the schema.

Run: python scripts/config_page.py > docs/configuration.md
"""

import inspect
import json
import re
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any

from omegaconf import MISSING as NO_DEFAULT

from adaecho.config.schema import Config

_HEAD = Path(__file__).with_name("config_page.txt").read_text()


def comments_of(schema: type) -> dict[str, str]:
    """Return the comments above and after each field of a dataclass, by field name."""
    found, above = {}, []
    for line in inspect.getsource(schema).splitlines():
        code, _, comment = (part.strip() for part in line.partition("#"))
        if comment and not code:
            above.append(comment)
        elif field := re.match(r"(\w+): ", code):
            found[field[1]] = " ".join([*above, comment]).strip()
            above = []
    return found


def default_of(field: "Field[Any]") -> str:
    """Return the default of a field as it would be written on a command line."""
    value = field.default if field.default is not MISSING else field.default_factory()  # type: ignore[misc]
    return value.replace(NO_DEFAULT, "-") if isinstance(value, str) else json.dumps(value)


def rows(schema: type, prefix: str = "") -> list[str]:
    """Return one row of the table for each key."""
    comments = comments_of(schema)
    return [
        f"| `{prefix}{field.name}` | `{default_of(field)}` | {comments[field.name].replace('|', 'or')} |"
        for field in fields(schema)
        if not is_dataclass(field.default_factory) and field.name != "task"
    ]


def page() -> str:
    """Return the text of the whole page."""
    parts = [_HEAD, _section("Top level", inspect.getdoc(Config) or "", rows(Config))]
    for field in fields(Config):
        schema: Any = field.default_factory
        if is_dataclass(schema):
            text = (inspect.getdoc(schema) or "").replace("``", "`")
            parts.append(_section(f"`{field.name}`", text, rows(schema, f"{field.name}.")))
    return "\n".join(parts)


def _section(title: str, text: str, lines: list[str]) -> str:
    return "\n".join([f"## {title}", "", text, "", "| key | default | |", "|---|---|---|", *lines, ""])


if __name__ == "__main__":
    print(page(), end="")
