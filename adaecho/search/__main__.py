"""``python -m adaecho.search status|collect FOLDER``: a sweep's state or outcome, from its folders alone."""

import argparse
import sys
from pathlib import Path

from rich.console import Console

from adaecho.errors import FolderError, UserError
from adaecho.records.files import read_json
from adaecho.search.design import Design
from adaecho.search.progress import arm_table
from adaecho.search.report import remarks, write_outcome
from adaecho.search.state import SweepState
from adaecho.search.study import mirror


def read_state(folder: Path) -> SweepState:
    """Where the sweep in ``folder`` stands.

    Raises:
        FolderError: no sweep was begun there, or a record is damaged.
    """
    path = folder / "design.json"
    if not path.exists():
        raise FolderError(f"{folder}: no sweep, for it has no design.json; give the folder that -m printed")
    return SweepState(Design.from_plain(read_json(path)), folder)


def status(folder: Path, console: Console) -> None:
    """Print where every arm stands, and bring the Optuna study up to that."""
    state = read_state(folder)
    running = [trial for trial in state.missing() if state.search(trial).status(trial.index) == "running"]
    console.print(arm_table(state, running))
    mirror(state)
    for line in remarks(state):
        console.print(line, soft_wrap=True, highlight=False)


def collect(folder: Path, console: Console) -> None:
    """Write ``trials.json``, ``outcome.json`` and the Optuna study of what there is; print the outcome."""
    write_outcome(read_state(folder), console)


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m adaecho.search", description=__doc__)
    parser.add_argument("command", choices=("status", "collect"))
    parser.add_argument("folder", type=Path, help="of the sweep, e.g. runs/quickstart/digits")
    typed = parser.parse_args(arguments)
    try:
        {"status": status, "collect": collect}[typed.command](typed.folder, Console())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
