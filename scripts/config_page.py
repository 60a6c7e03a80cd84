"""Every config key, from the schema's own comments.

``python scripts/config_page.py > docs/configuration.md`` makes the page anew.
"""

import ast
import inspect
import io
import json
import tokenize
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

from omegaconf import MISSING as NO_DEFAULT

from adaecho.config.schema import Config

_HEAD = """# Config keys

<!-- Made by scripts/config_page.py from the comments in adaecho/config/; a test holds it current. -->

Every key of `python -m adaecho.run` (or `adaecho`, which is the same). `--cfg job` prints the values that a
command composes, `--help` the groups and the main keys. A default of `-` means that a config group or the
task's YAML sets it. What a key allows is checked before anything starts, and a message says what to change.
A task has keys of its own below `task.`

`eval "$(adaecho -sc install=bash)"` completes groups, keys and values on Tab; alike with `zsh` and `fish`.
"""


def comments_of(schema: type) -> dict[str, str]:
    """What is written above and behind each field of a dataclass."""
    source = inspect.getsource(schema)
    (defined,) = ast.parse(source).body
    assert isinstance(defined, ast.ClassDef)
    lines = source.splitlines()
    behind: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            behind[token.start[0]] = token.string.removeprefix("#").strip()
    found = {}
    for statement in defined.body:
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        above, line = [], statement.lineno - 1
        while lines[line - 1].strip().startswith("#"):
            above.insert(0, behind[line])
            line -= 1
        last = behind.get(statement.end_lineno or statement.lineno, "")
        found[statement.target.id] = " ".join([*above, last]).strip()
    return found


def default_of(field: "Field[Any]") -> str:
    """As it is written on a command line."""
    value = field.default if field.default is not MISSING else field.default_factory()  # type: ignore[misc]
    if value == NO_DEFAULT:
        return "-"
    return value if isinstance(value, str) else json.dumps(value)


def rows(schema: type, prefix: str = "") -> list[str]:
    """A row of the table for each key."""
    comments = comments_of(schema)
    return [
        f"| `{prefix}{field.name}` | `{default_of(field)}` | {comments[field.name].replace('|', 'or')} |"
        for field in fields(schema)
        if not is_group(field) and field.name != "task"
    ]


def is_group(field: "Field[Any]") -> bool:
    return is_dataclass(field.default_factory)


def page() -> str:
    """The whole page."""
    parts = [_HEAD, _section("Of the run", inspect.getdoc(Config) or "", rows(Config))]
    for field in fields(Config):
        schema: Any = field.default_factory
        if is_group(field):
            text = (inspect.getdoc(schema) or "").replace("``", "`")
            parts.append(_section(f"`{field.name}`", text, rows(schema, f"{field.name}.")))
    return "\n".join(parts)


def _section(title: str, text: str, lines: list[str]) -> str:
    return "\n".join([f"## {title}", "", text, "", "| key | default | |", "|---|---|---|", *lines, ""])


if __name__ == "__main__":
    print(page(), end="")
