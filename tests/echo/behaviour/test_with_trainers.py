"""EchoLoader alone under DDP, Fabric, Accelerate and Lightning, in two processes each."""

import json
import os
import signal
import subprocess
import sys
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


def on_two_ranks(name: str, folder: Path) -> list[dict[str, Any]]:
    if name != "ddp" and find_spec("accelerate" if name == "accelerate" else "lightning") is None:
        pytest.skip(f"{name} is not installed, with which the loop trains: pip install '.[trainers]'")
    variables = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(WORLD),
        "LOCAL_WORLD_SIZE": str(WORLD),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.echo.loops_of_trainers", name, str(folder)],
        cwd=folder, env=variables, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        _, errors = process.communicate(timeout=240)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, errors
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)]


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


def test_under_ddp(tmp_path: Path) -> None:
    saw = on_two_ranks("ddp", tmp_path)
    check(saw)
    for rank in saw:
        assert rank["again"] == rank["seen"][1]  # after set_epoch(1)
        assert (
            "EchoLoader shares out the examples among the ranks itself; leave the sampler out"
            in rank["sampler"]
        )
        assert "loader.set_epoch(n) goes to an iteration" in rank["its_set_epoch"]
    shares = [sorted(label for batch in rank["by_sampler"] for label in batch) for rank in saw]
    assert sorted(shares[0] + shares[1]) == sorted([*range(ROWS)] * 2)
    assert set(shares[0]).isdisjoint(shares[1])


def test_under_fabric(tmp_path: Path) -> None:
    saw = on_two_ranks("fabric", tmp_path)
    check(saw)
    for rank in saw:
        assert rank["setup_dataloaders"].startswith("TypeError: Only PyTorch DataLoader are")


def test_under_accelerate(tmp_path: Path) -> None:
    saw = on_two_ranks("accelerate", tmp_path)
    check(saw)
    for rank in saw:
        assert rank["unchanged"]
        assert rank["scheduled"] == EPOCHS * (ROWS // 8) * WORLD
        assert rank["skip_first_batches"].startswith("AttributeError: an EchoLoader has no attribute")


def test_under_lightning(tmp_path: Path) -> None:
    saw = on_two_ranks("lightning", tmp_path)
    check(saw, first=1)  # it calls iter() once before, to see whether it can
    for rank in saw:
        assert rank["resumed_weight"] == rank["weight"]


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
            ValueError, match=r"rank was 0 and is 1 now; each rank goes on from .*state_of_all_ranks"
        ),
    ):
        other.load_state_dict(own)
    loader.close()
