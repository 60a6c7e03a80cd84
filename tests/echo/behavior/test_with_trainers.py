"""EchoLoader under DDP, Fabric, Accelerate and Lightning, in two processes each."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from adaecho import EchoLoader
from tests.echo.loops_of_trainers import EPOCHS, PACKAGES, ROWS, SAVED_AFTER, SAVED_IN_EPOCH, make
from tests.ports import free_port

WORLD = 2
OnTwoRanks = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> OnTwoRanks:
    """Return the results of both ranks by name of the trainer. One process imports all trainers and forks."""
    folder = tmp_path_factory.mktemp("trainers")
    ranks = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(WORLD), "LOCAL_WORLD_SIZE": str(WORLD)}
    ports = [f"{name}={free_port()}" for name, package in PACKAGES.items() if find_spec(package)]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.echo.loops_of_trainers", str(folder), *ports],
        cwd=folder, env={**os.environ, **ranks}, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        _, errors = process.communicate(timeout=240)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    def of_trainer(name: str) -> list[dict[str, Any]]:
        if find_spec(PACKAGES[name]) is None:
            pytest.skip(f"{name} is not installed, with which the loop trains: pip install '.[trainers]'")
        files = [folder / name / f"{rank}.json" for rank in range(WORLD)]
        assert all(file.exists() for file in files), errors
        return [json.loads(file.read_text()) for file in files]

    return of_trainer


def assert_sharded(ranks: list[list[list[int]]]) -> None:
    """Batches of each rank contain all rows twice, and no row at two ranks."""
    shares = [[label for batch in batches for label in batch] for batches in ranks]
    assert sorted(label for share in shares for label in share) == sorted([*range(ROWS)] * 2)
    assert set(shares[0]).isdisjoint(shares[1])


# Iteration of the first epoch: Lightning calls iter() once before as a check
FIRST = {"ddp": 0, "fabric": 0, "accelerate": 0, "lightning": 1}


@pytest.mark.parametrize("name", FIRST)
def test_each_rank_reads_its_shard_and_resumes_exactly(name: str, on_two_ranks: OnTwoRanks) -> None:
    results = on_two_ranks(name)
    for epoch in range(EPOCHS):
        assert_sharded([rank["seen"][epoch] for rank in results])
    for number, rank in enumerate(results):
        seen = rank["seen"]
        with make(rank=number, world_size=WORLD) as alone:
            alone.set_epoch(FIRST[name])
            assert seen == [[labels.tolist() for _, labels in alone] for _ in range(EPOCHS)]
        assert rank["lengths"] == [len(epoch) for epoch in seen] == [ROWS // 8] * EPOCHS
        assert seen[0] != seen[1]
        assert rank["rest"] == [seen[SAVED_IN_EPOCH][SAVED_AFTER:], *seen[SAVED_IN_EPOCH + 1 :]]
        assert rank["fresh"] == EPOCHS * ROWS // WORLD
        for error in rank["early"]:
            assert (
                "RuntimeError: this EchoLoader was created before torch.distributed was initialized" in error
            )
    # The trainer averaged the gradients, so both ranks have the same weights
    assert results[0]["weight"] == results[1]["weight"]


def test_set_epoch_and_samplers_under_ddp(on_two_ranks: OnTwoRanks) -> None:
    results = on_two_ranks("ddp")
    for rank in results:
        assert rank["again"] == rank["seen"][1]  # after set_epoch(1)
        assert "EchoLoader itself shards the examples; leave out the sampler" in rank["sampler"]
        assert "has no attribute 'sampler'" in rank["its_set_epoch"]
    assert_sharded([rank["by_sampler"] for rank in results])


def test_methods_of_fabric_accelerate_and_lightning(on_two_ranks: OnTwoRanks) -> None:
    for rank in on_two_ranks("fabric"):
        assert rank["setup_dataloaders"].startswith("TypeError: Only PyTorch DataLoader are")
    for rank in on_two_ranks("accelerate"):
        assert rank["unchanged"]
        assert rank["scheduled"] == EPOCHS * (ROWS // 8) * WORLD
        assert rank["skip_first_batches"].startswith("AttributeError: 'EchoLoader' object has no attribute")
    for rank in on_two_ranks("lightning"):
        assert rank["resumed_weight"] == rank["weight"]


def test_a_state_of_all_ranks_needs_the_same_number_of_ranks() -> None:
    with make() as loader, make(rank=1, world_size=2) as other:
        next(iter(loader))
        state = loader.state_dict()
        own = {name.removeprefix("0."): value for name, value in state.items()}
        del own["ranks"]
        for into, given, message in (
            (loader, {**state, "ranks": 2}, "2 ranks saved this state within an iteration, but 1 load it"),
            (EchoLoader(torch.arange(9), 2), state, "load_state_dict: batch_size was 8"),
            (
                other,
                own,
                "rank was 0 and is now 1; within an iteration each rank resumes.*state_of_all_ranks",
            ),
        ):
            with pytest.raises(ValueError, match=message):
                into.load_state_dict(given)


def test_a_state_of_all_ranks_destroys_its_process_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a thread of gloo may abort the process (pytorch/pytorch#190489)."""
    gather, groups = torch.distributed.all_gather_object, []

    def recorded(*arguments: Any, group: Any) -> None:
        gather(*arguments, group=group)
        groups.append(group)

    monkeypatch.setattr(torch.distributed, "all_gather_object", recorded)
    store = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        with make() as loader:
            next(iter(loader))
            state = loader.state_dict()
        assert (state["ranks"], state["0.fresh_examples"]) == (1, loader.fresh_examples)
        with pytest.raises(ValueError, match="not registered"):
            torch.distributed.get_rank(groups[0])
    finally:
        torch.distributed.destroy_process_group()
