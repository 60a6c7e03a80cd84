"""Count words and sentences that are hard to read, and fail if there are more than pyproject.toml allows.

The script checks pages, docstrings, comments and messages. The limits in pyproject.toml may only be lowered.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORDS = re.compile(
    r"\b(anew|beside|told|tells|of its own|of their own|goes on|go on|such an?|mend(s|ed)?|wherever|whatever|"
    r"came out|comes out|comes there|no other|for want of|at hand|in vain|as ever|is dealt|shared out)\b",
    re.IGNORECASE,
)
MAX_SENTENCE_WORDS = 35


def texts_of_page(page: str) -> Iterator[str]:
    """Yield the paragraphs and list items of a page, without code, tables, headings and links."""
    page = re.sub(r"(?s:```.*?```|<!--.*?-->)|(?m:^( {4}|\||#).*?$)|\([^ )]*\)", "\n\n", page)
    yield from re.split(r"\n\s*\n|\n\s*[-*] |\n\s*\d+\. ", page)


def texts_of_code(source: str) -> Iterator[str]:
    """Yield comments, docstrings and messages. Strings with at least three spaces count as messages."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count(" ") >= 3:
            yield from re.split(r"\n\s*\n|::\n|\n\s*\w+: ", node.value)


def main() -> None:
    ceilings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["adaecho"]["prose"]
    listed = subprocess.run(["git", "ls-files", "*.md", "*.py"], cwd=ROOT, capture_output=True, check=True)
    files = {ROOT / name for name in listed.stdout.decode().split()}
    found: dict[str, list[str]] = {"words": [], "sentences": []}
    for path in sorted(files - {Path(__file__)}):
        text = path.read_text()
        for paragraph in texts_of_page(text) if path.suffix == ".md" else texts_of_code(text):
            found["words"] += [f"{path.relative_to(ROOT)}: {match[0]}" for match in WORDS.finditer(paragraph)]
            for sentence in re.split(r"[.:;?!]\s", paragraph):
                if len(sentence.split()) > MAX_SENTENCE_WORDS:
                    found["sentences"].append(f"{path.relative_to(ROOT)}: {sentence.strip()[:60]!r}")
    for kind, places in found.items():
        print(f"{kind:20} {len(places):6,} of {ceilings[kind]:6,}")
    if "-v" in sys.argv:
        print(*found["words"], *found["sentences"], sep="\n")
    above = [kind for kind, places in found.items() if len(places) > ceilings[kind]]
    sys.exit(f"above the ceiling: {', '.join(above)}; see scripts/prose.py -v" if above else None)


main()
