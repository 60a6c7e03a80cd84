"""The Hydra sweeper ``quasirandom``, which runs a whole sweep from overrides to results."""

import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from adaecho.config import size_defaults
from adaecho.config.schema import SearchConfig, to_plain
from adaecho.config.slurm import SlurmSettings
from adaecho.errors import print_line
from adaecho.records.folder import FolderLock, move_aside
from adaecho.records.wandb_mirror import exported
from adaecho.search import launch
from adaecho.search.arms import build_arms, composer, parse_overrides
from adaecho.search.design import SEARCH, Design, record_design, stable_hash
from adaecho.search.report import (
    Progress,
    counted,
    headline,
    remarks,
    unfinished,
    write_outcome,
)
from adaecho.search.state import SweepState
from adaecho.search.worker import ATTEMPTS, Worker


def sweep(config: DictConfig, config_loader: ConfigLoader, arguments: Sequence[str]) -> None:
    """Run the trials of a sweep that have not been run yet, and write the results.

    Args:
        config: the config of the sweep, including Hydra's own settings.
        config_loader: Hydra's config loader.
        arguments: the overrides on the command line.

    Raises:
        SystemExit: a search is incomplete at the end; the exit code is 1.
    """
    HydraConfig.instance().set_config(config)  # needed to resolve ${hydra:...}
    design, notes = build_design(config, config_loader, arguments)
    folder = sweep_folder(config, design)
    with ExitStack() as stack:
        lock = FolderLock(folder)
        lock.acquire()
        stack.callback(lock.release)
        if config.restart and (folder / "design.json").exists():
            move_aside(folder)
            lock.release()
            lock.acquire()
        record_design(design, folder)
        state = SweepState(design, folder)
        for trial in state.missing():  # trials that failed before get new attempts
            (folder / str(trial) / ATTEMPTS).unlink(missing_ok=True)
        stack.enter_context(exported(config.tracking, folder))
        print_line("\n".join([*notes, *headline(state)]))
        if state.missing() and not run(state, config):
            return
        write_outcome(state)
        print_line("\n".join(next_steps(config, folder)))
        if unfinished(state) or remarks(state):
            sys.exit(1)


def run(state: SweepState, config: DictConfig) -> bool:
    """Run the remaining trials. Return False if Slurm is still running them, otherwise True."""
    missing, look = len(state.missing()), Progress(state)
    worker = Worker(str(state.folder.resolve()))
    if config.hydra.runtime.choices["hydra/launcher"] != "slurm":
        launch.run_here(worker, min(config.search.workers, missing), config.threads, look)
        return True
    launcher: Any = OmegaConf.to_container(config.hydra.launcher)
    settings = SlurmSettings(**{key: launcher[key] for key in SlurmSettings.__dataclass_fields__})
    worker.ranks = settings.ranks
    jobs = launch.submit(state.folder, worker, settings, missing)
    print_line(f"{counted(jobs, 'job')} submitted as {launch.job_name(state.folder)}")
    if settings.wait:
        launch.watch(state.folder, look)
        return True
    for command in ("status", "collect"):
        print_line(f"  python -m adaecho.search {command} {state.folder}")
    return False


def sweep_folder(config: DictConfig, design: Design) -> Path:
    """Return the folder of a sweep. By default, its name is a hash of the design."""
    folder = Path(config.hydra.sweep.dir)
    chosen = any(str(one).startswith("hydra.sweep.dir=") for one in config.hydra.overrides.hydra)
    if chosen or design.experiment:  # an experiment has one fixed folder
        return folder
    arms = {arm.name: arm.to_dict() for arm in design.arms}
    return folder / f"{stable_hash(arms, design.seed, design.prune):016x}"[:10]


def build_design(
    config: DictConfig, config_loader: ConfigLoader, arguments: Sequence[str]
) -> tuple[Design, list[str]]:
    """Build the design of a sweep from the command line, and return messages to print."""
    plain, typed = to_plain(config), parse_overrides(arguments, config_loader)
    search = SearchConfig(**plain["search"])
    arms, notes = build_arms(typed, search.arms, composer(config_loader, config))
    if config.hydra.runtime.choices.get("scale"):
        notes.insert(0, size_defaults.describe(plain))
    if search.max_diverged is None:
        search.max_diverged = 2 * search.trials
    settings = {name: getattr(search, name) for name in SEARCH}
    experiment = str(config.hydra.runtime.choices.get("experiment") or "")
    return Design(tuple(arms), **settings, experiment=experiment), notes


def next_steps(config: DictConfig, folder: Path) -> list[str]:
    """Return commands that the user may want to run after the sweep."""
    typed = shlex.join(["python", "-m", "adaecho.run", *sys.argv[1:]])
    collect = shlex.join(["python", "-m", "adaecho.records.collect", str(folder), "--command", typed])
    lines = [f"to save the tables in results/, for `make figures`:\n  {collect}"]
    if config.tracking.kind == "wandb" and config.tracking.mode == "offline":
        lines.append(f"to upload {os.environ.get('WANDB_DIR', '.')}/wandb to W&B: wandb sync")
    return lines
