"""``make reproduce BUDGET_S=540``: run the next unfinished experiments of the reproduction, for 540 seconds.

If time runs out during a sweep, the next call continues that sweep. The results of finished sweeps are in
``runs/results/``. The command ``python -m experiments.evidence --results runs/results`` then draws the
figures and decides which of the paper's claims hold.

``make reproduce CIFAR10=FOLDER`` adds the sweeps on CIFAR-10, except fig4. For that experiment, see
experiments/fig4/README.md.
"""

import argparse
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from adaecho.errors import report_errors
from adaecho.records.collect import collect_sweep

# Each sweep is given as experiment, task and further overrides.
_SMALL = "search.trials=16 search.repeats=3"
CELLS = (
    *((name, "digits", "") for name in ("quickstart", "fig3", "fig5", "fig8", "fig8_early", "fig7a", "fig7b",
      "fig6", "fig3_winners", "fig3_winners_fresh", "controls", "reuse")),
    # Drop an arm: text has no augmentation, so example echoing has only one variant.
    ("fig3", "small_text_tiny", f"{_SMALL} ~search.arms.example_before_e2"),
    ("fig5", "small_text_tiny", "search.trials=8 max_fresh_examples=6000 "
     + " ".join(f"~search.arms.e{factor}_batch128" for factor in (1, 2, 4, 8, 16))),
)  # fmt: skip
OF_CIFAR10 = (
    ("fig3", "cifar10_small", _SMALL), ("fig3_in_a_row", "cifar10_small", _SMALL),
    ("controls_cifar10", "cifar10_small", ""),
    *((name, "cifar10", "") for name in ("cifar10_depth8", "cifar10_depth8_80", "schedule_clock",
      "schedule_clock_e4")),
)  # fmt: skip


def run(arguments: list[str], left_s: float) -> bool:
    """Run or continue one sweep for at most ``left_s`` seconds, and return whether it has finished."""
    # Start a process group, so that at the end of the budget every trial gets Ctrl-C and writes a checkpoint.
    with subprocess.Popen([sys.executable, "-m", "adaecho.run", *arguments], process_group=0) as sweep:
        try:
            return sweep.wait(left_s) == 0
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as end:
            sweep.send_signal(signal.SIGINT)
            if isinstance(end, KeyboardInterrupt):
                sys.exit("interrupted; run the same command to continue")
            return sweep.wait() == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget-s", type=float, default=540.0, help="seconds after which to stop")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the sweeps")
    parser.add_argument("--results", type=Path, default=Path("runs/results"), help="folder of the tables")
    parser.add_argument("--cifar10", help="folder of CIFAR-10, as for data.path")
    parser.add_argument("overrides", nargs="*", help="overrides for every sweep, e.g. search.workers=1")
    options = parser.parse_args()
    end = time.monotonic() + options.budget_s
    for experiment, task, overrides in (*CELLS, *(OF_CIFAR10 if options.cifar10 else ())):
        arguments = ["-m", f"experiment={experiment}", f"task={task}", *overrides.split(), *options.overrides]
        folder = options.runs / experiment / task
        ended, name = folder / "collected", shlex.join(["python", "-m", "adaecho.run", *arguments])
        arguments += [f"data.path={options.cifar10}"] * ("cifar10" in task) + [f"hydra.sweep.dir={folder}"]
        left_s = end - time.monotonic()
        if not ended.exists() and left_s > 0 and run(arguments, left_s):
            with report_errors():
                ended.write_text(f"{collect_sweep(folder, options.results, name)}\n")
        print(f"{'done' if ended.exists() else 'left'}: {name}", flush=True)


if __name__ == "__main__":
    main()
