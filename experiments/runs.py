"""Record each run of an experiment in a file, so that the same command continues after an interruption."""

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir

from adaecho.config.schema import Config, from_plain, to_plain
from adaecho.records.collect import one_line_each, write_tables
from adaecho.records.environment import environment
from adaecho.records.files import folder_errors, read_json, write_json, write_text
from adaecho.records.trials import table_text
from adaecho.run import CONF

Row = dict[str, Any]
Record = dict[str, Any]


def config_of(overrides: Sequence[str]) -> Config:
    """Return the config with overrides such as ``batch_size=64``."""
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        return from_plain(to_plain(compose("config", overrides=list(overrides))))


def options(doc: str | None, name: str, tasks: Iterable[str], overrides_help: str) -> argparse.ArgumentParser:
    """Prepare an experiment: limit torch to one thread, and return the command-line parser."""
    torch.set_num_threads(1)
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=raw)
    parser.add_argument("task", choices=tasks)
    parser.add_argument("overrides", nargs="*", help=overrides_help)
    parser.add_argument("--runs", type=Path, default=Path("runs") / name, help="folder with one file per run")
    parser.add_argument("--results", type=Path, default=Path("runs/results") / name, help="tables")
    return parser


def recorded(path: Path, run: Callable[[], list[Row]], digits: int = 7) -> Record:
    """Read the record of a run from its file, or execute the run first if there is no file."""
    if not path.exists():
        made_by = {key: value for key, value in environment().items() if key != "slurm"}
        rows = [  # floats are rounded to this number of significant digits
            {key: float(f"{one:.{digits}g}") if isinstance(one, float) else one for key, one in row.items()}
            for row in run()
        ]
        with folder_errors(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, {"environment": made_by, "rows": rows})
        print(f"{path.stem} has ended", flush=True)
    found: Record = read_json(path)
    return found


def write_results(
    results: Path, records: Sequence[Record], read: Callable[[list[Row]], list[Row]], command: str
) -> None:
    """Write the rows of all runs, and the results that ``read`` computes from them, to a folder."""
    made_by: list[Any] = []
    for record in records:
        made_by += [record["environment"]] if record["environment"] not in made_by else []
    rows = [row for record in records for row in record["rows"]]
    # write_tables adds origin.json with the command, the machines and the package versions.
    texts = {"worths.json": table_text(rows), "outcome.json": one_line_each(read(rows))}
    write_tables(results, texts, {"commands": [command], "environments": made_by})
    write_text(results / "worths.json", texts["worths.json"])
    print(results)
