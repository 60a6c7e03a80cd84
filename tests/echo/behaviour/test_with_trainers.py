"""EchoLoader alone under DDP, Fabric, Accelerate and Lightning, in two processes each."""

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
from tests.echo.loops_of_trainers import EPOCHS, ROWS, SAVED_AFTER, SAVED_IN_EPOCH, make
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[3]
WORLD = 2


PACKAGES = {"ddp": "torch", "fabric": "lightning", "accelerate": "accelerate", "lightning": "lightning"}
OnTwoRanks = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> OnTwoRanks:
    """``on_two_ranks(name)``: what each rank saw. One process imports all trainers and forks their ranks."""
    folder = tmp_path_factory.mktemp("trainers")
    variables = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "MASTER_ADDR": "127.0.0.1",
        "WORLD_SIZE": str(WORLD),
        "LOCAL_WORLD_SIZE": str(WORLD),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.echo.loops_of_trainers", str(folder)]
        + [f"{name}={free_port()}" for name, package in PACKAGES.items() if find_spec(package)],
        cwd=folder, env=variables, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        _, errors = process.communicate(timeout=240)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    def saw(name: str) -> list[dict[str, Any]]:
        if find_spec(PACKAGES[name]) is None:
            pytest.skip(f"{name} is not installed, with which the loop trains: pip install '.[trainers]'")
        files = [folder / name / f"{rank}.json" for rank in range(WORLD)]
        assert all(file.exists() for file in files), errors
        return [json.loads(file.read_text()) for file in files]

    return saw


def batches(loader: EchoLoader) -> list[list[int]]:
    return [labels.tolist() for _, labels in loader]


def check(saw: list[dict[str, Any]], first: int = 0) -> None:
    """That each rank got its share, all of it, and nothing else, and went on from the middle exactly.

    Args:
        first: the number of the iteration that was the first epoch.
    """
    for epoch in range(EPOCHS):
        shares = [[label for batch in rank["seen"][epoch] for label in batch] for rank in saw]
        assert sorted(label for share in shares for label in share) == sorted([*range(ROWS)] * 2)
        assert set(shares[0]).isdisjoint(shares[1])
    for number, rank in enumerate(saw):
        with make(rank=number, world_size=WORLD) as alone:  # without any trainer
            alone.set_epoch(first)
            assert rank["seen"] == [batches(alone) for _ in range(EPOCHS)]
        assert rank["lengths"] == [len(epoch) for epoch in rank["seen"]] == [ROWS // 8] * EPOCHS
        assert rank["seen"][0] != rank["seen"][1]
        assert rank["rest"] == [
            rank["seen"][SAVED_IN_EPOCH][SAVED_AFTER:],
            *rank["seen"][SAVED_IN_EPOCH + 1 :],
        ]
        assert rank["fresh"] == EPOCHS * ROWS // WORLD
        for error in rank["early"]:
            assert error.startswith(
                "RuntimeError: torch.distributed was initialised, with 2 ranks, after this"
            )
    # Gradients were averaged: from different batches both made the same weights.
    assert saw[0]["weight"] == saw[1]["weight"]


def test_under_ddp(on_two_ranks: OnTwoRanks) -> None:
    saw = on_two_ranks("ddp")
    check(saw)
    for rank in saw:
        assert rank["again"] == rank["seen"][1]  # after set_epoch(1)
        assert (
            "EchoLoader shares out the examples among the ranks itself; leave the sampler out"
            in rank["sampler"]
        )
        assert "has no attribute 'sampler'" in rank["its_set_epoch"]
    shares = [sorted(label for batch in rank["by_sampler"] for label in batch) for rank in saw]
    assert sorted(shares[0] + shares[1]) == sorted([*range(ROWS)] * 2)
    assert set(shares[0]).isdisjoint(shares[1])


def test_under_fabric(on_two_ranks: OnTwoRanks) -> None:
    saw = on_two_ranks("fabric")
    check(saw)
    for rank in saw:
        assert rank["setup_dataloaders"].startswith("TypeError: Only PyTorch DataLoader are")


def test_under_accelerate(on_two_ranks: OnTwoRanks) -> None:
    saw = on_two_ranks("accelerate")
    check(saw)
    for rank in saw:
        assert rank["unchanged"]
        assert rank["scheduled"] == EPOCHS * (ROWS // 8) * WORLD
        assert rank["skip_first_batches"].startswith("AttributeError: 'EchoLoader' object has no attribute")


def test_under_lightning(on_two_ranks: OnTwoRanks) -> None:
    saw = on_two_ranks("lightning")
    check(saw, first=1)  # it calls iter() once before, to see whether it can
    for rank in saw:
        assert rank["resumed_weight"] == rank["weight"]


def threads() -> dict[str, str]:
    """The name of each thread of this process by its id; a thread of gloo's names itself once it runs."""
    names = {}
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it ended since
            names[task.name] = (task / "comm").read_text().strip()
    return names


def gloo_threads_besides(before: dict[str, str]) -> set[str]:
    """Those begun since. By id, not by number: of those before, some may not have named themselves then."""
    return {thread for thread, name in threads().items() if name == "pt_gloo_runloop"} - set(before)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="/proc tells the names of threads")
def test_no_thread_of_gloo_is_left_with_a_state_of_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it aborts a process that ends just then: pytorch/pytorch#190489."""
    gather, during = torch.distributed.all_gather_object, []

    def watched(*arguments: Any, **named: Any) -> None:
        gather(*arguments, **named)
        during.append(gloo_threads_besides(before))

    monkeypatch.setattr(torch.distributed, "all_gather_object", watched)
    store = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        torch.distributed.barrier()  # with which the default group's threads begin
        before = threads()
        with make() as loader:
            next(iter(loader))
            state = loader.state_dict()
            assert [own["fresh_examples"] for own in state["ranks"]] == [loader.fresh_examples]
        assert during[0]  # else the line below shows nothing
        assert not gloo_threads_besides(before)
    finally:
        torch.distributed.destroy_process_group()


def test_a_state_of_all_ranks_needs_as_many() -> None:
    loader = make()
    next(iter(loader))
    state = loader.state_dict()
    (own,) = state["ranks"]
    alone = EchoLoader(torch.arange(9), 2)
    with pytest.raises(ValueError, match="the state is that of 2 ranks, and there are 1 now"):
        loader.load_state_dict({"ranks": [own, own]})
    with pytest.raises(ValueError, match="load_state_dict: batch_size was 8"):
        alone.load_state_dict(state)
    with (
        make(rank=1, world_size=2) as other,
        pytest.raises(
            ValueError,
            match=r"rank was 0 and is 1 now; within an iteration each rank goes on from .*state_of_all_ranks",
        ),
    ):
        other.load_state_dict(own)
    loader.close()
