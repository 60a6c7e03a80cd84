"""mypy --strict accepts the README and the examples, and rejects wrong arguments."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)

WRONG = """
from adaecho import AdaScale, EchoLoader

EchoLoader([1, 2], batch_size="4")
AdaScale([])
"""


def strict(*places: Path) -> list[str]:
    # The project's settings share the cache with `make lint`.
    command = [sys.executable, "-m", "mypy", "--no-error-summary", *map(str, places)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert not done.stderr, done.stderr
    # torch has no types for Tensor.backward.
    return [line for line in done.stdout.splitlines() if 'untyped function "backward"' not in line]


@pytest.mark.other_forms  # mypy reads torch for a minute
def test_programs_pass_mypy_strict_and_wrong_ones_do_not(tmp_path: Path) -> None:
    programs = {"wrong": WRONG}
    programs |= {f"readme{number}": code for number, code in enumerate(README) if "import cv2" not in code}
    for name, code in programs.items():
        (tmp_path / f"{name}.py").write_text(code)
    # Lightning's types take long to check, Grain has none, and Ray may be absent.
    examples = [
        path
        for path in (ROOT / "examples").glob("*.py")
        if not re.search(r"^import (grain|lightning|ray)\b", path.read_text(), flags=re.MULTILINE)
    ]
    errors = strict(*examples, *sorted(tmp_path.glob("*.py")))
    mistakes = [line for line in errors if "/wrong.py:" in line and ": error:" in line]
    assert [line.rpartition("  ")[2] for line in mistakes] == ["[arg-type]", "[arg-type]"]
    assert [line for line in errors if "/wrong.py:" not in line] == []
