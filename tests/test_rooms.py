"""The import contracts in pyproject.toml hold, and import-linter finds violations."""

import ast
import re
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


def test_import_directions_hold() -> None:
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


# Files that import modules by a string, which import-linter cannot see, and our modules named there.
BY_NAME = {
    "__init__.py": set(),  # the packages of the public names
    "config/tasks.py": {"adaecho.tasks", "adaecho.callbacks"},  # a package, and a group of entry points
    "training/callbacks.py": set(),  # the user's callbacks
}


def test_only_tasks_are_imported_by_name() -> None:
    found = {}
    for path in (ROOT / "adaecho").rglob("*.py"):
        text = path.read_text()
        if re.search(r"\bimport_module\(|__import__\(|\brun_module\(", text):
            texts = (getattr(node, "value", None) for node in ast.walk(ast.parse(text)))
            names = {
                name
                for name in texts
                if isinstance(name, str) and re.fullmatch(r"adaecho(\.\w+)+(:\w+)?", name)
            }
            found[path.relative_to(ROOT / "adaecho").as_posix()] = names
    assert found == BY_NAME


WRONG = {
    "No import cycles": ("tasks/base.py", "def build():\n    import adaecho.tasks.images"),
    "Packages import": ("models/images.py", "import adaecho.training.schedule"),
    "EchoLoader and": ("adascale/estimators.py", "import adaecho.errors"),
    "Figures": ("figures/style.py", "import adaecho.config.schema"),
    "The search": ("search/design.py", "import adaecho.tasks.base"),
    "adaecho does not": ("figures/curves.py", "import experiments.evidence.claims"),
    "experiments.evidence": ("../experiments/evidence/claims.py", "import adaecho.training.schedule"),
    "Layers within": ("echo/order/keyed.py", "import adaecho.echo.memory.pool"),
}


def test_a_forbidden_import_is_found(tmp_path: Path) -> None:
    for package in ("adaecho", "experiments/evidence"):
        shutil.copytree(ROOT / package, tmp_path / package)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for room, line in WRONG.values():
        with (tmp_path / "adaecho" / room).open("a") as file:
            file.write(f"\n{line}\n")
    done = lint(tmp_path)
    broken = {line for line in done.stdout.splitlines() if " BROKEN" in line}
    assert len(broken) == len(WRONG), done.stdout + done.stderr
    assert all(any(line.startswith(name) for line in broken) for name in WRONG)
