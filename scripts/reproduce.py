"""``make reproduce BUDGET_S=540``: the next unfinished cells of the reproduction, within a budget of seconds.

A cell is one experiment on one task: a sweep, or a program in its folder that keeps what it has measured.
What a budget cuts short goes on with the next call: cells run in the order below; a finished one is collected
into ``runs/results/`` and not run again. Then ``python -m experiments.evidence --results runs/results`` draws
them and decides the claims.

``make reproduce CIFAR10=FOLDER`` adds those on CIFAR-10, but for experiments/fig4,
which needs a slow store besides: see its page.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from adaecho.errors import UserError, told
from adaecho.records.collect import collect_sweep
from adaecho.search.design import read_design
from adaecho.search.state import SweepState


@dataclass(frozen=True)
class Cell:
    """One experiment on one task.

    Attributes:
        experiment, task: options of their config groups.
        overrides: of the sweep, e.g. its number of trials.
        recorded_as: the task's name in records, where it isn't its option's.
        data: where the task's data lie; None where the packages bring them.
    """

    experiment: str
    task: str
    overrides: tuple[str, ...] = ()
    recorded_as: str = ""
    data: str | None = None

    def arguments(self, data: str | None) -> list[str]:
        of_data = [] if data is None else [f"data.path={data}"]
        return ["-m", f"experiment={self.experiment}", f"task={self.task}", *self.overrides, *of_data]

    def command(self) -> str:
        """As a record has it: without this machine's folders."""
        return shlex.join(["python", "-m", "adaecho.run", *self.arguments(self.data and "DATA")])

    def folder(self) -> Path:
        """Of the sweep among runs, and of its tables among results."""
        return Path(self.experiment) / (self.recorded_as or self.task)

    def process(self, folder: Path) -> list[str]:
        """What Python is to run, into a folder among runs."""
        return ["-m", "adaecho.run", *self.arguments(self.data), f"hydra.sweep.dir={folder}"]


@dataclass(frozen=True)
class Program:
    """An experiment that is no sweep: ``measure.py`` in its folder, which writes its tables itself."""

    experiment: str
    task: str

    def command(self) -> str:
        """As a record has it."""
        return f"python -m experiments.{self.experiment}.measure"

    def folder(self) -> Path:
        """Of its runs, and of its tables among results."""
        return Path(self.experiment) / self.task

    def process(self, folder: Path) -> list[str]:
        """What Python is to run, into a folder among runs."""
        return ["-m", f"experiments.{self.experiment}.measure", "--runs", str(folder)]


CELLS = (
    Cell("quickstart", "digits"),
    Cell("fig3", "digits"),
    Cell("fig5", "digits"),
    Cell("fig8", "digits"),
    Cell("fig8_early", "digits"),
    Cell("fig7a", "digits"),
    Cell("fig7b", "digits"),
    Cell("fig6", "digits"),
    Cell("fig3_winners", "digits"),
    Cell("fig3_winners_fresh", "digits"),
    Cell("controls", "digits"),
    Cell("reuse", "digits"),
    Cell(
        "fig3",
        "small_text_tiny",
        # Text isn't augmented: echoed before it is echoed after it.
        ("search.trials=16", "search.repeats=3", "~search.arms.example_before_e2"),
        recorded_as="small_text",
    ),
    Cell(
        "fig5",
        "small_text_tiny",
        (
            "search.trials=8",
            "max_fresh_examples=6000",
            *(f"~search.arms.e{factor}_batch128" for factor in (1, 2, 4, 8, 16)),
        ),
        recorded_as="small_text",
    ),
)
OF_CIFAR10 = (
    Cell("fig3", "cifar10_small", ("search.trials=16", "search.repeats=3"), recorded_as="cifar10"),
    Cell("fig3_in_a_row", "cifar10_small", ("search.trials=16", "search.repeats=3"), recorded_as="cifar10"),
    Cell("controls_cifar10", "cifar10_small", recorded_as="cifar10"),
    Cell("cifar10_depth8", "cifar10"),
    Cell("cifar10_depth8_80", "cifar10"),
    Cell("schedule_clock", "cifar10"),
    Cell("schedule_clock_e4", "cifar10"),
)
PROGRAMS = (Program("repeat_value", "digits"),)
_STOP_S = 60  # for the checkpoints of an interrupted sweep


def standing(folder: Path) -> tuple[int, int]:
    """Trials that have ended, and those that are still to run; (0, 0) where the sweep hasn't begun."""
    if not (folder / "design.json").exists():
        return 0, 0
    state = SweepState(read_design(folder), folder)
    missing = len(state.missing())
    return len(state.wanted()) - missing, missing


def run(cell: Cell | Program, folder: Path, budget_s: float, extra: list[str]) -> bool:
    """Run or continue one cell; whether it has ended within the budget.

    Raises:
        UserError: the sweep can't be run; its own message has said why.
        KeyboardInterrupt: after the sweep has ended at it too.
    """
    process = subprocess.Popen([sys.executable, *cell.process(folder), *extra], process_group=0)
    try:
        code = process.wait(timeout=max(budget_s, 0))
    except (subprocess.TimeoutExpired, KeyboardInterrupt) as end:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C: every trial leaves a checkpoint
        code = process.wait(timeout=_STOP_S)
        if isinstance(end, KeyboardInterrupt):
            raise
        return code == 0  # it may have ended just before
    if code:
        raise UserError(f"{cell.command()}: ended with code {code}; its message is above")
    return True


def reproduce(
    cells: tuple[Cell | Program, ...], runs: Path, results: Path, budget_s: float, extra: list[str]
) -> None:
    """Run what is missing until all is done or the budget spent, and say how far it came."""
    start = time.monotonic()
    for cell in cells:
        folder, record = runs / cell.folder(), results / cell.folder()
        if (record / "outcome.json").exists():
            print(f"done: {cell.command()}", flush=True)
            continue
        left_s = budget_s - (time.monotonic() - start)
        given = extra if isinstance(cell, Cell) else ["--results", str(record)]
        if left_s > 0 and run(cell, folder, left_s, given):
            if isinstance(cell, Cell):
                collect_sweep(folder, results, cell.command())
            print(f"done: {cell.command()}, collected in {record}")
            continue
        ended, missing = standing(folder)
        left = f"{missing} of {ended + missing} trials" if ended + missing else "all"
        print(f"left: {cell.command()}: {left}")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget-s", type=float, default=540.0, help="seconds after which to stop")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where sweeps keep their folders")
    parser.add_argument(
        "--results", type=Path, default=Path("runs/results"), help="where tables are collected"
    )
    parser.add_argument(
        "--cifar10", help="folder of CIFAR-10, as data.path takes it; without it, no cells of it"
    )
    parser.add_argument("overrides", nargs="*", help="for every sweep, e.g. search.workers=1")
    options = parser.parse_args()
    of_cifar10 = [replace(cell, data=options.cifar10) for cell in OF_CIFAR10 if options.cifar10]
    cells = (*CELLS, *PROGRAMS, *of_cifar10)
    with told():
        try:
            reproduce(cells, options.runs, options.results, options.budget_s, options.overrides)
        except KeyboardInterrupt:
            print("interrupted; the same command continues", file=sys.stderr)
            sys.exit(130)


if __name__ == "__main__":
    main()
