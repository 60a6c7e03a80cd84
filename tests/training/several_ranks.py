"""Runs on several ranks, each in a forked process, with the environment of torchrun."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from adaecho.config.schema import Config, from_plain, to_plain
from adaecho.errors import UserError
from adaecho.ranks import distributed_context
from adaecho.training.trial import run_trial
from tests.forks import FORKS
from tests.ports import free_port

END_S = 120  # for a rank to end once another has
needs_gloo = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="this torch has no gloo, which ranks on a CPU need",
)

Before = Callable[[int], None]


def environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """The variables that torchrun sets."""
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip


def _rank(plain: dict[str, Any], folder: str, variables: dict[str, str], before: Before | None) -> None:
    os.environ |= variables
    if before is not None:
        before(int(variables["RANK"]))
    config, log = from_plain(plain), Path(f"{folder}.rank{variables['RANK']}")
    try:
        with distributed_context(torch.device("cpu"), config.rank_timeout_s) as ranks:
            summary = run_trial(config, Path(folder), ranks=ranks)
        log.write_text(summary["status"])
    except Exception as error:
        log.write_text(f"{type(error).__name__}: {error}")
        if not isinstance(error, UserError):
            sys.exit(1)
        sys.exit(2)


def run_on(
    world_size: int,
    config: Config,
    folder: Path | str,
    before: Before | None = None,
    others: dict[int, Config] | None = None,
    variables: dict[str, str] | None = None,
) -> list[tuple[int | None, str]]:
    """Train on several ranks; returns each one's exit code (-9: killed), and its status or error.

    Args:
        before: called in the process of each rank with its number, before it connects.
        others: different configs of some ranks.
        variables: additional environment variables.
    """
    port, folder = free_port(), Path(folder).absolute()
    for log in folder.parent.glob(f"{folder.name}.rank*"):
        log.unlink()
    processes = []
    for rank in range(world_size):
        plain = to_plain((others or {}).get(rank, config))
        each = {**environment(rank, world_size, port), **(variables or {})}
        processes.append(FORKS.Process(target=_rank, args=(plain, str(folder), each, before)))
        processes[-1].start()
    for process in processes:
        process.join(END_S)
    for process in processes:
        if process.is_alive():  # torchrun would end a rank that hangs
            process.kill()
            process.join()
    logs = [Path(f"{folder}.rank{rank}") for rank in range(world_size)]
    said = [log.read_text() if log.exists() else "" for log in logs]
    return [(process.exitcode, text) for process, text in zip(processes, said, strict=True)]
