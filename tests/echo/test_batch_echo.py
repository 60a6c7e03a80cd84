"""Batch echo where a thread behind the consumer copies batches, as it does when they are large."""

from itertools import islice
from typing import Any

import pytest
import torch

from adaecho import EchoLoader
from adaecho.echo import batch_echo
from tests.echo import test_exact, test_restore, test_snapshot
from tests.echo.sources import IDS, SOURCES, VARIANTS

BATCH_VARIANTS = [variant for variant in VARIANTS if variant["echo"] == "batch"]
BATCH_IDS = [name for name in IDS if name.startswith("batch")]


@pytest.fixture
def _all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_echo, "_SLOW_BYTES", 1)


@pytest.mark.usefixtures("_all_are_large")
@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("variant", BATCH_VARIANTS, ids=BATCH_IDS)
def test_large_batches_come_as_small_ones(variant: dict[str, Any], kind: str) -> None:
    test_exact.test_equals_the_slow_reference(variant, kind, num_workers=2)
    test_exact.test_writing_into_a_batch_changes_no_repeat(variant, kind, num_workers=1)
    test_restore.test_restores_at_every_batch(variant, kind, num_workers=2)


@pytest.mark.usefixtures("_all_are_large")
@pytest.mark.parametrize("variant", BATCH_VARIANTS, ids=BATCH_IDS)
def test_passes_and_restarts_with_large_batches(variant: dict[str, Any]) -> None:
    for kind in ("map", "stream"):
        test_exact.test_epochs_drain_the_buffer(variant, 2, kind)
    test_restore.test_the_beginning_of_a_pass_after_one_given_up(variant, num_workers=2)
    test_snapshot.test_restores_within_epochs(variant)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_sparse_tensors_are_repeated(num_workers: int) -> None:
    def source() -> list[dict[str, torch.Tensor]]:
        return [{"x": torch.ones(3), "edges": torch.eye(3).to_sparse() * number} for number in (1, 2)]

    with EchoLoader(source, None, echo="batch", factor=2, epochs=1, num_workers=num_workers) as loader:
        assert [int(batch["edges"].to_dense()[0, 0]) for batch in loader] == [1, 1, 2, 2]


def batches_of_all_sizes() -> list[torch.Tensor]:
    return [
        torch.arange(number, number + length) for number, length in enumerate([2, 3, 90, 4, 70, 1, 5, 80])
    ]


@pytest.mark.parametrize("buffer", [0, 3])
@pytest.mark.parametrize("factor", [1.5, 3])
def test_batches_of_all_sizes(monkeypatch: pytest.MonkeyPatch, factor: float, buffer: int) -> None:
    """The first large batch is repeated by the consumer, what follows by a thread; nobody can tell."""
    monkeypatch.setattr(batch_echo, "_SLOW_BYTES", 400)
    common: dict[str, Any] = {"batch_size": None, "echo": "batch", "factor": factor, "epochs": 2}
    common["batch_shuffle_buffer"] = buffer
    expected = list(EchoLoader(batches_of_all_sizes, **common))
    with EchoLoader(batches_of_all_sizes, num_workers=1, **common) as loader:
        states = []
        for batch, one in zip(loader, expected, strict=True):
            assert torch.equal(batch, one)
            batch.fill_(-1)
            states.append(loader.state_dict())
        for position, state in enumerate(states[:-1]):
            loader.load_state_dict(test_restore.through_torch_save(state))
            for batch, one in zip(islice(loader, 4), expected[position + 1 :], strict=False):
                assert torch.equal(batch, one)
