"""Print the size of every package, and fail if a size is above its budget in pyproject.toml.

The size is the number of code lines, without comments and docstrings. For tests, all lines count. Budgets may
only be lowered.
"""

import ast
import io
import sys
import tokenize
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
LAYOUT = tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER


def code_lines(source: str) -> int:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {n for t in tokens if t.type not in LAYOUT for n in range(t.start[0], t.end[0] + 1)}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


def main() -> None:
    budgets = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["adaecho"]["budgets"]
    above: list[str] = []
    for name, budget in budgets.items():
        folder, _, pattern = name.removesuffix(" (files)").partition("/*")
        files = list((ROOT / folder).glob(f"*{pattern}") if pattern else (ROOT / folder).rglob("*.py"))
        count = (lambda text: len(text.splitlines())) if name == "tests" else code_lines
        size = len(files) if name.endswith("(files)") else sum(count(f.read_text()) for f in files)
        print(f"{name:20} {size:6,} of {budget:6,} {len(files):4} files")
        above += [name] * (size > budget)
    sys.exit(f"above budget: {', '.join(above)}; remove code" if above else None)


main()
