"""Run the programs in examples/ and the code blocks of README and docs/ as a user does.

``python -m tests.programs FILE`` runs the programs that FILE lists. Each one runs in a fork of a process that
has imported torch and the trainers, because these imports take longer than all programs.
"""

import importlib
import json
import os
import re
import runpy
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.ports import free_port

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
DOCS = {path.name: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}
PYTHON = {
    f"{name}-{number}": code
    for name, text in {"README.md": README, **DOCS}.items()
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL))
}
TRAINERS = ("accelerate", "grain", "lightning", "transformers", "webdataset")
ALSO_IMPORTED = ("adaecho.echo.loader", "adaecho.headroom", "torch._dynamo", "torchvision.transforms.v2")
BLOCK = re.compile(r"^```(\w+) ?(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(heading: str) -> list[tuple[str, str, str]]:
    """The code blocks of a section of docs/your-own.md: language, file name or "", text."""
    (section,) = (part for part in DOCS["your-own.md"].split("\n## ") if part.startswith(f"{heading}\n"))
    return BLOCK.findall(section)


def write(found: list[tuple[str, str, str]], folder: Path) -> None:
    """Write the blocks that have a file name."""
    for _, name, text in found:
        if name:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)


def commands(found: list[tuple[str, str, str]]) -> list[str]:
    """The lines of the shell blocks."""
    return [line for kind, _, text in found if kind == "shell" for line in text.splitlines()]


def imported(code: str) -> list[str]:
    """The trainers that a block imports."""
    return re.findall(rf"^(?:import|from) ({'|'.join(TRAINERS)})\b", code, flags=re.MULTILINE)


def run(programs: dict[str, dict[str, Any]], folder: Path) -> dict[str, tuple[int, str]]:
    """Exit status and output, by name.

    Args:
        programs: by name: ``code`` or ``path``, and ``ranks`` if several.
        folder: each program runs in a new folder inside it.
    """
    (folder / "programs.json").write_text(json.dumps(programs))
    done = subprocess.run(
        [sys.executable, "-m", "tests.programs", "programs.json"],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {
        name: (status, (folder / name / "said").read_text())
        for name, status in json.loads((folder / "statuses.json").read_text()).items()
    }


def _run(program: dict[str, Any], name: str) -> None:
    if "path" in program:
        sys.argv = [program["path"]]
        runpy.run_path(program["path"], run_name="__main__")
    else:
        exec(compile(program["code"], name, "exec"), {"__name__": "__main__"})


def _fork(task: Callable[[], None], variables: dict[str, str]) -> int:
    """Fork a process that runs ``task`` in the current folder; returns its id."""
    if pid := os.fork():
        return pid
    status = 1
    try:
        said = os.open("said", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(said, 1)
        os.dup2(said, 2)
        os.environ |= variables
        task()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _ranks(world_size: int) -> list[dict[str, str]]:
    """The variables that torchrun sets, for each rank."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world_size)}
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]


def main() -> None:
    programs = json.loads(Path(sys.argv[1]).read_text())
    for name in ("torch", *ALSO_IMPORTED, *TRAINERS):
        with suppress(ImportError):
            importlib.import_module(name)
    statuses, start = {}, Path.cwd()
    for name, program in programs.items():
        (start / name).mkdir()
        os.chdir(start / name)
        variables = _ranks(program["ranks"]) if "ranks" in program else [{}]
        processes = [_fork(lambda program=program, name=name: _run(program, name), one) for one in variables]
        statuses[name] = max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0 for pid in processes)
    (start / "statuses.json").write_text(json.dumps(statuses))


if __name__ == "__main__":
    main()
