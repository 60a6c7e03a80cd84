"""What ``hydra/sweeper=quasirandom`` does: from overrides to arms, design, trials and outcome."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from rich.console import Console

from adaecho.records.lock import FolderLock
from adaecho.search.arms import build_arms, composer, parse_typed
from adaecho.search.design import Design
from adaecho.search.pool import Pool
from adaecho.search.progress import Progress
from adaecho.search.report import write_outcome
from adaecho.search.state import SweepState
from adaecho.search.sweep import LocalSweep, move_aside, record_design


def sweep(config: DictConfig, config_loader: ConfigLoader, arguments: Sequence[str]) -> None:
    """Run what is missing of a sweep and write its outcome.

    Args:
        config: composed for the sweep as a whole, with Hydra's own node.
        config_loader: composes the arms.
        arguments: the task overrides that were typed.

    Raises:
        UserError: what was asked for can't be run; naming what, why and what to do.
    """
    HydraConfig.instance().set_config(config)  # the sweep's folder is named through ${hydra:...}
    folder = Path(config.hydra.sweep.dir)
    console = Console()
    if config.fresh:
        move_aside(folder)
    with ExitStack() as stack:
        lock = FolderLock(folder)
        lock.acquire()
        stack.callback(lock.release)

        def start_pool() -> Pool:
            return stack.enter_context(
                Pool(config.search.workers, threads=config.threads, log_folder=folder / "workers")
            )

        # Workers take seconds to import torch, which a new sweep needs for sure: meanwhile arms are composed.
        pool = None if (folder / "design.json").exists() else start_pool()
        design = build_design(config, config_loader, arguments)
        record_design(design, folder)
        state = SweepState(design, folder)
        console.print(headline(state), highlight=False, soft_wrap=True)
        if state.missing():
            pool = pool or start_pool()
            with Progress(state, config.search.workers, console) as progress:
                LocalSweep(state, pool, progress, group=str(folder)).run()
        write_outcome(state, str(config.hydra.runtime.choices.experiment or ""), console)


def build_design(config: DictConfig, config_loader: ConfigLoader, arguments: Sequence[str]) -> Design:
    """The design that these overrides describe; see ``build_arms`` for what can be wrong."""
    typed = parse_typed(arguments, config_loader)
    arms, search = build_arms(typed, composer(config_loader, config, typed.fixed))
    return Design(
        arms=arms,
        seed=search.seed,
        trials=search.trials,
        repeats=search.repeats,
        max_diverged=2 * search.trials if search.max_diverged is None else search.max_diverged,
    )


def headline(state: SweepState) -> str:
    """What the sweep consists of, in one line."""
    searches = list(state.searches.values())
    left = len(state.missing())
    total = sum(search.num_wanted() for search in searches)
    text = f"{state.folder}: {_count(len(state.design.arms), 'arm')}"
    if state.design.repeats > 1:
        text += f" x {state.design.repeats} searches"
    return f"{text}, {_count(total, 'trial')}, {left} to run"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
