"""What ``hydra/sweeper=quasirandom`` does: from overrides to arms, design, trials and outcome."""

import os
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from rich.console import Console

from adaecho.config import scale
from adaecho.config.identity import BUDGETS, identity
from adaecho.config.schema import to_plain
from adaecho.config.slurm import SlurmSettings
from adaecho.errors import ConfigError, warn
from adaecho.masking import VARIABLE, masked, secret_urls
from adaecho.records.folder import move_aside
from adaecho.records.lock import FolderLock
from adaecho.records.terminal import Terminal
from adaecho.records.tracking import exported
from adaecho.search.arms import Typed, build_arms, composer, parse_typed
from adaecho.search.design import (
    MAX_TRIALS,
    Design,
    OtherDesignError,
    check_design,
    record_design,
    stable_hash,
)
from adaecho.search.local import LocalWorkers, affordable
from adaecho.search.progress import SweepProgress
from adaecho.search.report import remarks, unfinished, write_outcome
from adaecho.search.slurm import SlurmWorkers, job_name
from adaecho.search.state import SweepState, has_finished


def sweep(config: DictConfig, config_loader: ConfigLoader, arguments: Sequence[str]) -> None:
    """Run what is missing of a sweep and write its outcome.

    Args:
        config: composed for the sweep as a whole, with Hydra's own node.
        config_loader: composes the arms.
        arguments: the task overrides that were typed.

    Raises:
        UserError: what was asked for can't be run; naming what, why and what to do.
        SystemExit: a search could not be completed; code 1.
    """
    HydraConfig.instance().set_config(config)  # for what is named through ${hydra:...}
    launcher, typed, plain = _launcher(config), parse_typed(arguments, config_loader), to_plain(config)
    folder = sweep_folder(config, plain, typed)
    with ExitStack() as stack:
        lock = FolderLock(folder)
        lock.acquire()
        stack.callback(lock.release)

        is_new = {path.name for path in folder.iterdir()} <= {"lock", "workers"}
        design = build_design(config, plain, typed, config_loader)
        if (config.fresh and not is_new) or _is_superseded(design, folder):
            move_aside(folder)
            lock.release()
            lock.acquire()
        state = SweepState(design, folder)
        record_design(design, folder)
        urls = secret_urls([arm.config for arm in design.arms])
        stack.enter_context(exported(config.tracking, folder))
        console = Terminal(markup=False)
        console.print(headline(state), highlight=False, soft_wrap=True)
        if launcher == "slurm" and state.missing():
            if urls:  # which hands the environment of sbatch to its jobs
                os.environ[VARIABLE] = " ".join(urls)
            if not run_on_slurm(state, config, console):
                return
        elif launcher == "basic":
            run_here(state, config, console, urls)
        write_outcome(state, console)
        for line in next_steps(config, folder, arguments):
            console.print(line, highlight=False, soft_wrap=True)
        if unfinished(state) or remarks(state):
            sys.exit(1)


def _is_superseded(design: Design, folder: Path) -> bool:
    """Whether the folder holds another design, none of whose trials has finished: a first try, mended.

    Raises:
        FolderError: it holds another one, and results of it.
    """
    try:
        check_design(design, folder)
    except OtherDesignError:
        if has_finished(folder):
            raise
        warn(f"{folder}: held another design, none of whose trials had finished; it is kept beside")
        return True
    return False


def next_steps(config: DictConfig, folder: Path, arguments: Sequence[str]) -> list[str]:
    """What a user may want to do with the sweep's folder."""
    of_hydra = [one for one in config.hydra.overrides.hydra if one != "hydra.mode=MULTIRUN"]  # that is -m
    command = ["python", "-m", "adaecho.run", *_config_dir(config), "-m"]
    typed = shlex.join([*command, *masked([*arguments, *of_hydra])])
    collect = shlex.join(["python", "-m", "adaecho.records.collect", str(folder), "--command", typed])
    lines = [f"to keep these numbers as small tables in results/, which `make figures` draws: {collect}"]
    if config.tracking.kind == "wandb" and config.tracking.mode == "offline":
        lines.append(f"to upload {os.environ.get('WANDB_DIR', '.')}/wandb to W&B: wandb sync")
    return lines


def _config_dir(config: DictConfig) -> list[str]:
    """The flag of that name as it was typed, without which one's own configs aren't found again."""
    sources = config.hydra.runtime.config_sources
    typed = [source.path for source in sources if source.provider == "command-line"]
    return ["--config-dir", os.path.relpath(typed[0])] if typed else []


def run_here(state: SweepState, config: DictConfig, console: Console, urls: Sequence[str]) -> None:
    """Run what is missing with workers on this machine."""
    missing = len(state.missing())
    workers, too_many = affordable(config.search.workers)
    wanted = min(workers, missing)
    if too_many and missing > workers:
        console.print(too_many, highlight=False, soft_wrap=True)
    of_all = {"threads": config.threads, "typed": state.design.named(), "urls": urls}
    with (
        SweepProgress(state, console) as progress,
        LocalWorkers(state.folder, wanted, **of_all) as local,
    ):
        local.watch(progress)


def run_on_slurm(state: SweepState, config: DictConfig, console: Console) -> bool:
    """Submit what is missing and, if asked to, watch it to its end; whether it was watched."""
    settings = SlurmSettings(
        **{key: config.hydra.launcher[key] for key in SlurmSettings.__dataclass_fields__}
    )
    slurm = SlurmWorkers(state, settings)
    jobs = slurm.submit()
    console.print(f"{_count(jobs, 'worker')} submitted as {job_name(state.folder)}", highlight=False)
    if not settings.wait:
        for command in ("status", "collect"):
            console.print(
                f"  python -m adaecho.search {command} {state.folder}", highlight=False, soft_wrap=True
            )
        return False
    with SweepProgress(state, console) as progress:
        slurm.watch(progress)
    return True


def _launcher(config: DictConfig) -> str:
    launcher = str(config.hydra.runtime.choices["hydra/launcher"])
    if launcher not in ("basic", "slurm"):
        raise ConfigError(f"hydra/launcher={launcher}: hydra/sweeper=quasirandom runs with basic or slurm")
    return launcher


def sweep_folder(config: DictConfig, plain: dict[str, Any], typed: Typed) -> Path:
    """The folder of a sweep: an experiment's, the one that was typed, or for an ad-hoc sweep one per design.

    An ad-hoc sweep's name depends on all that may not change when it is continued.
    """
    folder = Path(config.hydra.sweep.dir)
    chosen = any(str(typed).startswith("hydra.sweep.dir=") for typed in config.hydra.overrides.hydra)
    if chosen or config.hydra.runtime.choices.get("experiment"):
        return folder
    search = [plain["search"][key] for key in ("seed", "prune", "arms")]
    of_task = plain["search"]["axes"] if plain["search"]["trials"] > 1 else {}
    search.append({key: axis for key, axis in of_task.items() if key not in typed.intervals})
    intervals = {key: str(interval) for key, interval in typed.intervals.items()}
    budgets = [plain[key] for key in BUDGETS]
    digest = stable_hash(identity(plain), budgets, search, sorted(masked(typed.choices)), intervals)
    return folder / f"{digest:016x}"[:10]


def build_design(
    config: DictConfig, plain: dict[str, Any], typed: Typed, config_loader: ConfigLoader
) -> Design:
    """The design that these overrides describe; see ``build_arms`` for what can be wrong."""
    arms, search, left_out = build_arms(typed, composer(config_loader, config, plain, typed.fixed))
    if config.hydra.runtime.choices.get("scale"):
        print(scale.told(config, plain))
    for line in left_out:
        print(line)
    total = search.trials * search.repeats * len(arms)
    if total > MAX_TRIALS:
        raise ConfigError(
            f"search.trials={search.trials}: with {_count(len(arms), 'arm')} and search.repeats="
            f"{search.repeats} that is {total:,} trials, each with a folder; at most {MAX_TRIALS:,} in a "
            "sweep: lower search.trials (the paper takes 100)"
        )
    return Design(
        arms=arms,
        seed=search.seed,
        trials=search.trials,
        repeats=search.repeats,
        max_diverged=2 * search.trials if search.max_diverged is None else search.max_diverged,
        prune=search.prune,
        experiment=str(config.hydra.runtime.choices.get("experiment") or ""),
    )


def headline(state: SweepState) -> str:
    """What the sweep consists of, in one line; in a second one which keys each arm searches, if any does."""
    searches = list(state.searches.values())
    left = len(state.missing())
    total = sum(search.num_wanted() for search in searches)
    text = f"{state.folder}: {_count(len(state.design.arms), 'arm')}"
    if state.design.repeats > 1:
        text += f" x {state.design.repeats} searches"
    text += f", {_count(total, 'trial')}, {left} to run"
    if not left:
        text += " (data and code are not looked at again; fresh=true starts anew)"
    # What an experiment sets for all arms is drawn all the same where its task searches it.
    searched = Counter(axis.key for arm in state.design.arms for axis in arm.axes)
    keys = [
        key if number == len(state.design.arms) else f"{key} (in {_count(number, 'arm')})"
        for key, number in searched.items()
    ]
    return f"{text}\nsearched: {', '.join(keys)}" if keys else text


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
