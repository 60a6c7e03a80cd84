"""Users' own code: undeclared and random datasets, long waits, batches of any class, and bad data."""

import logging
import multiprocessing
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from adaecho import EchoLoader
from adaecho.echo import threads
from adaecho.echo.batch.process_workers import WorkerProcess


@pytest.mark.parametrize("slow", ["read", "augment"])
def test_a_worker_serves_the_shorter_kind_of_request_first(slow: str) -> None:
    """Within a kind the order stays, because the last use of an example drops it."""
    context = multiprocessing.get_context("fork")
    begun, release = context.Event(), context.Event()
    order: list[str] = []

    def handler(what: str, number: int) -> list[str]:
        if number == 0 and what == slow:
            begun.set()
            release.wait(20)
        order.append(f"{what} {number}")
        return list(order)

    quick = "augment" if slow == "read" else "read"
    worker = WorkerProcess(lambda: handler, [], slots=1, slot_bytes=64)
    try:
        worker.start()
        worker.begin_receiving()
        tickets: list[Any] = [worker.send(0, slow, 0)]
        assert begun.wait(20)
        tickets += [
            worker.send(0, what, number)
            for what, number in [(slow, 1), (quick, 0), (slow, 2), (quick, 1), (quick, 2)]
        ]
        time.sleep(0.5)  # the worker receives all of them meanwhile
        release.set()
        worker.receive(tickets[1])  # in any order of receiving
        expected = [f"{slow} 0", *(f"{quick} {n}" for n in range(3)), f"{slow} 1", f"{slow} 2"]
        assert worker.receive(tickets[3]) == expected
    finally:
        worker.close()


class Noisy:
    """Draws noise in ``__getitem__``, like a torchvision dataset with a random ``transform=``."""

    def __init__(self, *, draws: bool = True) -> None:
        self.draws = draws

    def __len__(self) -> int:
        return 32

    def __getitem__(self, row: int) -> Any:
        return torch.rand(2) + row if self.draws else torch.ones(2) * row


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_dataset_that_draws_before_the_echo_warns_once(num_workers: int) -> None:
    echo: dict[str, Any] = {"echo": "example_before_augmentation", "factor": 2, "shuffle_buffer": 8}
    loader = EchoLoader(Noisy(), 4, num_workers=num_workers, epochs=1, **echo)
    with pytest.warns(UserWarning, match="Noisy draws random numbers.*augment=") as warned, loader:
        assert sum(map(len, loader)) == sum(map(len, loader)) == 64
    assert len(warned) == 1


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    "arguments",
    [
        {"echo": "none"},
        {"echo": "batch", "factor": 2},
        {"echo": "example_after_augmentation", "factor": 2, "shuffle_buffer": 8},
    ],
)
@pytest.mark.filterwarnings("error")
def test_draws_of_a_dataset_are_harmless_where_no_repeat_should_differ(
    arguments: dict[str, Any], num_workers: int
) -> None:
    with EchoLoader(Noisy(), 4, num_workers=num_workers, epochs=1, **arguments) as loader:
        list(loader)


@pytest.mark.filterwarnings("error")
def test_a_dataset_that_draws_nothing_does_not_warn() -> None:
    echo: dict[str, Any] = {"echo": "example_before_augmentation", "factor": 2, "shuffle_buffer": 8}
    augment = (lambda example: example + torch.rand(()), lambda example: example + torch.rand(()))
    with EchoLoader(Noisy(draws=False), 4, augment=augment, epochs=1, **echo) as loader:
        list(loader)


@contextmanager
def logged(event: Any) -> Iterator[list[str]]:
    """Collect lines of the log, and set an event with each."""
    lines: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())
            event.set()

    handler = Handler()
    logging.getLogger("adaecho").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("adaecho").removeHandler(handler)


class Stuck:
    """Row 21 takes until something was logged."""

    def __init__(self, logged: Any) -> None:
        self.logged = logged

    def __len__(self) -> int:
        return 40

    def __getitem__(self, row: int) -> Any:
        if row == 21:
            self.logged.wait(20)
        return np.float32(row)


@pytest.mark.parametrize("form", ["dataset", "iterable"])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [({}, "reading the source, "), ({"shuffle_buffer": 32}, "filling the buffer, .* of about 32")],
)
def test_a_long_wait_is_logged_with_its_reason(
    form: str, num_workers: int, arguments: dict[str, Any], reason: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr(threads, "_TELL_AFTER_S", 0.2)
    event = multiprocessing.get_context("fork").Event()
    stuck = Stuck(event)
    source: Any = stuck if form == "dataset" else lambda: map(stuck.__getitem__, range(40))
    if form == "dataset":
        arguments = {**arguments, "order": "sequential"}
    with (
        EchoLoader(source, 4, epochs=1, num_workers=num_workers, **arguments) as loader,
        logged(event) as lines,
    ):
        assert sum(map(len, loader)) == 40
    assert re.search(f"waiting for a batch for .* s: .*{reason}", lines[0])


def test_reading_a_buffer_again_is_logged_with_its_progress(monkeypatch: Any) -> None:
    monkeypatch.setattr(threads, "_TELL_AFTER_S", 0.2)
    event = multiprocessing.get_context("fork").Event()
    event.set()
    arguments: Any = {"shuffle_buffer": 32, "order": "sequential", "num_workers": 2}
    with EchoLoader(Stuck(event), 4, **arguments) as loader:
        next(iter(loader))
        state = loader.state_dict()
    event.clear()
    with EchoLoader(Stuck(event), 4, **arguments) as loader, logged(event) as lines:
        loader.load_state_dict(state)
        next(iter(loader))
    assert re.search(r"Stuck: reading the buffer again, \d+ of 32 examples", lines[0])


class Holder:
    """A batch with tensors, as TensorDict or a batch of graphs: ``to`` returns a moved batch."""

    def __init__(self, values: Any) -> None:
        self.values, self.device = values, "nowhere"

    def to(self, device: Any) -> "Holder":
        moved = Holder(self.values.to(device))
        moved.device = str(device)
        return moved


@dataclass
class Fields:
    """A batch without ``to``."""

    values: torch.Tensor


@pytest.mark.parametrize("num_workers", [0, 2])
def test_device_moves_every_class_with_a_method_to(num_workers: int) -> None:
    def collate(examples: list[Any]) -> Any:
        values = torch.as_tensor(np.stack(examples))
        return {"held": Holder(values), "packed": pack_sequence([values[:1], values[:1]])}

    rows = np.zeros((8, 2), np.float32)
    with EchoLoader(rows, 4, collate=collate, device="meta", num_workers=num_workers, epochs=1) as loader:
        for batch in loader:
            assert batch["held"].device == batch["held"].values.device.type == "meta"
            assert batch["packed"].data.device.type == "meta"


def test_device_refuses_a_class_without_a_method_to() -> None:
    loader = EchoLoader(
        np.zeros((8, 2), np.float32), 4, device="cpu", collate=lambda rows: Fields(torch.as_tensor(rows[0]))
    )
    with loader, pytest.raises(ValueError, match=r"device=: .*Fields has no method to\(device\)"):
        next(iter(loader))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", ["arrays", "dataset"])
@pytest.mark.parametrize("echo", ["none", "example_before_augmentation"])
def test_big_endian_arrays_are_converted(num_workers: int, kind: str, echo: str) -> None:
    rows = np.arange(24, dtype=">i4").reshape(8, 3)
    source: Any = rows if kind == "arrays" else Undeclared(rows)
    factor = 1 if echo == "none" else 2
    with EchoLoader(source, 4, echo=echo, factor=factor, num_workers=num_workers, epochs=1,
                    shuffle_buffer=4) as loader:  # fmt: skip
        batches = torch.cat(list(loader))
    assert batches.dtype == torch.int32
    assert sorted(batches[:, 0].tolist()) == sorted(factor * rows[:, 0].tolist())


class Undeclared:
    """A dataset of rows."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Any:
        if isinstance(self.rows[row], Exception):
            raise self.rows[row]
        return self.rows[row]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_epoch_of_bad_examples_only_raises_the_first_error(num_workers: int) -> None:
    broken = Undeclared([KeyError(f"row {row}") for row in range(8)])
    arguments: Any = {"num_workers": num_workers, "epochs": 1, "order": "sequential", "max_bad_examples": 8}
    with EchoLoader(broken, 4, **arguments) as loader:
        with pytest.raises(KeyError, match="row 0") as caught:
            list(loader)
        assert "all 8 examples were bad" in "".join(caught.value.__notes__)
    one_good = Undeclared([KeyError(f"row {row}") for row in range(8)] + [np.float32(1)])
    with EchoLoader(one_good, 4, **arguments) as loader:
        assert [batch.tolist() for batch in loader] == [[1.0]]
        assert len(loader.bad_examples) == 8
