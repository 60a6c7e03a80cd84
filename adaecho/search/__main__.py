"""``python -m adaecho.search status|collect FOLDER``: show the state of a sweep, or write its outcome."""

import argparse
from pathlib import Path

from adaecho.errors import print_line, report_errors
from adaecho.search.design import read_design
from adaecho.search.report import headline, show_outcome, write_outcome
from adaecho.search.state import SweepState


def main(arguments: list[str] | None = None) -> None:
    """Print the state of a sweep. The command ``collect`` also writes the results so far."""
    parser = argparse.ArgumentParser(prog="python -m adaecho.search", description=__doc__)
    parser.add_argument("command", choices=("status", "collect"))
    parser.add_argument("folder", type=Path, help="folder of the sweep, e.g. runs/quickstart/digits")
    typed = parser.parse_args(arguments)
    with report_errors():
        state = SweepState(read_design(typed.folder), typed.folder)
        print_line("\n".join(headline(state)))
        (write_outcome if typed.command == "collect" else show_outcome)(state)


if __name__ == "__main__":
    main()
