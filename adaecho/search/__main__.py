"""``python -m adaecho.search status|collect FOLDER``: a sweep's state or outcome, from its folders alone."""

import argparse
from pathlib import Path

from rich.console import Console

from adaecho.errors import told
from adaecho.records.files import record_errors
from adaecho.records.lock import is_held
from adaecho.records.terminal import Terminal
from adaecho.search.design import read_design
from adaecho.search.progress import arm_table
from adaecho.search.report import export, remarks, trial_rows, write_outcome
from adaecho.search.state import SweepState


def status(folder: Path, console: Console) -> None:
    """Print where every arm stands, and bring the Optuna study up to that."""
    state = SweepState(read_design(folder), folder)
    running = [trial for trial in state.missing() if is_held(state.trial_folder(trial))]
    console.print(arm_table(state, running))
    export(folder, state.design, trial_rows(state))
    for line in remarks(state):
        console.print(line, soft_wrap=True, highlight=False)


def collect(folder: Path, console: Console) -> None:
    """Write ``trials.json``, ``outcome.json`` and the Optuna study of what there is; print the outcome."""
    write_outcome(SweepState(read_design(folder), folder), console)


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m adaecho.search", description=__doc__)
    parser.add_argument("command", choices=("status", "collect"))
    parser.add_argument("folder", type=Path, help="of the sweep, e.g. runs/quickstart/digits")
    typed = parser.parse_args(arguments)
    with told(), record_errors(typed.folder):
        {"status": status, "collect": collect}[typed.command](typed.folder, Terminal(markup=False))


if __name__ == "__main__":
    main()
