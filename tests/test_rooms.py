"""The import directions of CONTRIBUTING.md, as contracts in pyproject.toml that import-linter checks."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUN = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", RUN], cwd=folder, capture_output=True, text=True, check=False,
        env={"PYTHONPATH": str(folder), "COLUMNS": "200"},
    )  # fmt: skip


def test_no_room_imports_one_above_it() -> None:
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


WRONG = {
    "No circle": ("tasks/base.py", "def build():\n    import adaecho.tasks.images"),
    "Rooms import": ("models/normalise.py", "import adaecho.training.schedule"),
    "The drop-ins": ("adascale/squares.py", "import adaecho.errors"),
    "Figures": ("figures/style.py", "import adaecho.config.schema"),
    "A search": ("search/design.py", "import adaecho.tasks.base"),
    "Within echo": ("echo/order/keyed.py", "import adaecho.echo.memory.pool"),
}


def test_an_import_in_a_wrong_direction_is_found(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "adaecho", tmp_path / "adaecho")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for room, line in WRONG.values():
        with (tmp_path / "adaecho" / room).open("a") as file:
            file.write(f"\n{line}\n")
    done = lint(tmp_path)
    broken = {line for line in done.stdout.splitlines() if " BROKEN" in line}
    assert len(broken) == len(WRONG), done.stdout + done.stderr
    assert all(any(line.startswith(name) for line in broken) for name in WRONG)
