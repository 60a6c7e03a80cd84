"""The sweeper ``hydra/sweeper=quasirandom``: from overrides to arms, design, trials and outcome."""

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
from rich.console import Console

from adaecho.config import size_defaults
from adaecho.config.schema import SearchConfig, to_plain
from adaecho.config.slurm import SlurmSettings
from adaecho.errors import ConfigError
from adaecho.records.folder import FolderLock, move_aside
from adaecho.records.wandb_mirror import exported
from adaecho.search import launch
from adaecho.search.arms import build_arms, composer, parse_overrides
from adaecho.search.design import Design, record_design, stable_hash
from adaecho.search.report import Progress, counted, headline, remarks, unfinished, write_outcome
from adaecho.search.state import SweepState
from adaecho.search.worker import ATTEMPTS, Worker


def sweep(config: DictConfig, config_loader: ConfigLoader, arguments: Sequence[str]) -> None:
    """Run the missing trials of a sweep and write its outcome.

    Args:
        config: config of the sweep, with Hydra's node.
        config_loader: composes the arms.
        arguments: the task overrides.

    Raises:
        UserError: the sweep cannot be run.
        SystemExit: a search is incomplete (code 1).
    """
    HydraConfig.instance().set_config(config)  # resolves ${hydra:...}
    launcher = str(config.hydra.runtime.choices["hydra/launcher"])
    if launcher not in ("basic", "slurm"):
        raise ConfigError(f"hydra/launcher={launcher}: hydra/sweeper=quasirandom runs with basic or slurm")
    console = Console(markup=False)
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
        for trial in state.missing():  # failed trials get new attempts
            (state.trial_folder(trial) / ATTEMPTS).unlink(missing_ok=True)
        stack.enter_context(exported(config.tracking, folder))
        for line in [*notes, *headline(state)]:
            console.print(line, highlight=False, soft_wrap=True)
        if state.missing() and not run(state, config, console):
            return
        write_outcome(state, console)
        for line in next_steps(config, folder, arguments):
            console.print(line, highlight=False, soft_wrap=True)
        if unfinished(state) or remarks(state):
            sys.exit(1)


def run(state: SweepState, config: DictConfig, console: Console) -> bool:
    """Run the missing trials, here or on Slurm. Return whether they have ended."""
    missing, look = len(state.missing()), Progress(state, console)
    worker = Worker(str(state.folder.resolve()))
    if config.hydra.runtime.choices["hydra/launcher"] == "basic":
        launch.run_here(worker, min(config.search.workers, missing), config.threads, look)
        return True
    launcher: Any = OmegaConf.to_container(config.hydra.launcher)
    settings = SlurmSettings(**{key: launcher[key] for key in SlurmSettings.__dataclass_fields__})
    worker.ranks = settings.ranks
    jobs = launch.submit(state.folder, worker, settings, missing)
    console.print(f"{counted(jobs, 'job')} submitted as {launch.job_name(state.folder)}", highlight=False)
    if settings.wait:
        launch.watch(state.folder, look)
        return True
    for command in ("status", "collect"):
        text = f"  python -m adaecho.search {command} {state.folder}"
        console.print(text, highlight=False, soft_wrap=True)
    return False


def sweep_folder(config: DictConfig, design: Design) -> Path:
    """Return the folder of a sweep: hydra.sweep.dir, that of the experiment, or one per design."""
    folder = Path(config.hydra.sweep.dir)
    chosen = any(str(one).startswith("hydra.sweep.dir=") for one in config.hydra.overrides.hydra)
    if chosen or design.experiment:
        return folder
    arms = {arm.name: arm.to_dict() for arm in design.arms}
    return folder / f"{stable_hash(arms, design.seed, design.prune):016x}"[:10]


def build_design(
    config: DictConfig, config_loader: ConfigLoader, arguments: Sequence[str]
) -> tuple[Design, list[str]]:
    """Return the design of these overrides, and messages on left-out combinations."""
    plain, typed = to_plain(config), parse_overrides(arguments, config_loader)
    search = SearchConfig(**plain["search"])
    arms, notes = build_arms(typed, search.arms, composer(config_loader, config))
    if config.hydra.runtime.choices.get("scale"):
        notes.insert(0, size_defaults.describe(config, plain))
    design = Design(
        arms=tuple(arms),
        seed=search.seed,
        trials=search.trials,
        repeats=search.repeats,
        max_diverged=2 * search.trials if search.max_diverged is None else search.max_diverged,
        prune=search.prune,
        experiment=str(config.hydra.runtime.choices.get("experiment") or ""),
    )
    return design, notes


def next_steps(config: DictConfig, folder: Path, arguments: Sequence[str]) -> list[str]:
    """Return the commands that a user may want to run next."""
    of_hydra = [one for one in config.hydra.overrides.hydra if one != "hydra.mode=MULTIRUN"]  # set by -m
    sources = [one.path for one in config.hydra.runtime.config_sources if one.provider == "command-line"]
    config_dir = ["--config-dir", os.path.relpath(sources[0])] if sources else []
    typed = shlex.join(["python", "-m", "adaecho.run", *config_dir, "-m", *arguments, *of_hydra])
    collect = shlex.join(["python", "-m", "adaecho.records.collect", str(folder), "--command", typed])
    lines = [f"to save the tables in results/, from which `make figures` draws: {collect}"]
    if config.tracking.kind == "wandb" and config.tracking.mode == "offline":
        lines.append(f"to upload {os.environ.get('WANDB_DIR', '.')}/wandb to W&B: wandb sync")
    return lines
