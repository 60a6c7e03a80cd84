"""Ctrl-C anywhere, and stopping, closing or pausing in another thread: nothing is lost, nothing is left."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch

from adaecho import EchoLoader
from adaecho.echo.batch import batch_echo
from adaecho.echo.batch.device import ToDevice
from adaecho.echo.memory.tree import collate
from adaecho.echo.order import plan
from adaecho.echo.order.permutation import Permutation
from tests.echo.sources import Dataset, Stream, add_noise, example


class Interrupting:
    """Calls what it wraps, and at some of the calls raises KeyboardInterrupt before or after."""

    def __init__(self, call: Callable[..., Any], *at: int, after: bool = False) -> None:
        self.call, self.at, self.after, self.calls = call, at, after, 0

    def __call__(self, *arguments: Any) -> Any:
        self.calls += 1
        if self.calls in self.at and not self.after:
            raise KeyboardInterrupt
        result = self.call(*arguments)
        if self.calls in self.at:
            raise KeyboardInterrupt
        return result


class Source(Dataset):
    def __init__(self, length: int, read: Callable[[int], Any]) -> None:
        super().__init__(length)
        self.read = read

    def __getitem__(self, row: int) -> Any:
        return self.read(super().__getitem__(row))


def same(one: Any) -> Any:
    return one


def taken(loader: EchoLoader, batches: int) -> tuple[list[Any], int]:
    """Batches, whatever interrupts them; and how many interrupts there were."""
    iterator, seen, interrupts = iter(loader), [], 0
    while len(seen) < batches:
        try:
            batch = next(iterator)
            seen.append((batch["x"].tolist(), batch["label"].tolist(), loader.fresh_examples))
        except KeyboardInterrupt:
            interrupts += 1
    return seen, interrupts


@pytest.mark.parametrize("where", ["read", "decode", "augment", "collate"])
@pytest.mark.parametrize(
    "echo", ["none", "batch", "example_before_augmentation", "example_after_augmentation"]
)
def test_an_interrupt_loses_nothing(where: str, echo: str) -> None:
    def make(*at: int) -> EchoLoader:
        calls = {"read": same, "decode": same, "augment": add_noise, "collate": collate}
        user: dict[str, Any] = {
            name: Interrupting(call, *(at if name == where else ())) for name, call in calls.items()
        }
        user["augment"] = partial(lambda call, one, rng: call(one, rng), user["augment"])
        source, factor = Source(30, user.pop("read")), 1 if echo == "none" else 2
        return EchoLoader(source, 4, echo=echo, factor=factor, shuffle_buffer=5, **user)

    expected, _ = taken(make(), 12)
    at = (2, 3, 5) if where == "collate" else (3, 9, 10, 21)
    assert taken(make(*at), 12) == (expected, len(at))


def test_an_interrupt_while_a_repeat_is_copied_neither_loses_nor_doubles_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def make() -> EchoLoader:
        return EchoLoader(Stream(30), 4, echo="batch", factor=3, batch_shuffle_buffer=2, restore="snapshot")

    expected, _ = taken(make(), 20)
    for after in (False, True):
        with monkeypatch.context() as patch:
            interrupting = Interrupting(batch_echo.duplicate, 1, 2, 5, after=after)
            patch.setattr(batch_echo, "duplicate", interrupting)
            assert taken(make(), 20) == (expected, 3)


def test_an_interrupt_of_the_loaders_own_work_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def examples() -> EchoLoader:
        return EchoLoader(Dataset(10), 4)

    def batches() -> EchoLoader:
        return EchoLoader([collate([example(row)] * 3) for row in range(9)].__iter__, None, echo="batch")

    for make, place, name in ((examples, Permutation, "rows"), (batches, ToDevice, "move")):
        expected, _ = taken(make(), 12)
        with monkeypatch.context() as patch:
            interrupting = Interrupting(getattr(place, name), 1, 3, 4, after=True)
            patch.setattr(place, name, lambda *arguments, call=interrupting: call(*arguments))
            assert taken(make(), 12) == (expected, 3)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("where", ["take", "consumed", "step", "received"])
@pytest.mark.parametrize("echo", ["none", "example_before_augmentation", "batch"])
def test_an_interrupt_while_a_batch_is_handed_over_loses_and_doubles_nothing(
    echo: str, where: str, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "_LEAST_APART", 16)  # so that marks are passed meanwhile
    common: dict[str, Any] = {"echo": echo, "factor": 1 if echo == "none" else 2, "shuffle_buffer": 9}
    common |= {"batch_shuffle_buffer": 3} if echo == "batch" else {}
    expected, interrupted = (EchoLoader(Dataset(50), 4, augment=add_noise, **common) for _ in range(2))
    stages = interrupted._stages.all
    owners = {"take": [interrupted._position], "step": [interrupted._clocks], "consumed": stages}
    for owner in owners.get(where, [interrupted._device]):
        call = Interrupting(getattr(owner, where), *range(1, 60, 4), after=after)
        monkeypatch.setattr(owner, where, call)
    seen, interrupts = taken(interrupted, 40)
    assert interrupts >= 10
    assert seen == taken(expected, 40)[0]
    states = [loader.state_dict() for loader in (interrupted, expected)]
    for state in states:
        del state["clocks"]
    assert str(states[0]) == str(states[1])


@pytest.mark.parametrize("restore", ["replay", "snapshot"])
def test_a_generator_that_an_interrupt_has_ended_is_not_taken_for_the_end_of_its_pass(restore: str) -> None:
    def make(*at: int) -> EchoLoader:
        read = Interrupting(example, *at)
        source = partial(map, read, range(30)) if not at else lambda: (read(row) for row in range(30))
        return EchoLoader(source, 4, shuffle_buffer=5, restore=restore)

    expected, _ = taken(make(), 12)
    loader = make(15)
    iterator, seen = iter(loader), []
    with suppress(KeyboardInterrupt):
        for batch in iterator:
            seen.append((batch["x"].tolist(), batch["label"].tolist(), loader.fresh_examples))
    with pytest.raises(RuntimeError, match="in the middle of its pass"):
        next(iterator)
    loader.load_state_dict(loader.state_dict())
    assert seen + taken(loader, 12 - len(seen))[0] == expected


@pytest.mark.parametrize("batch_size", [None, 1])
def test_a_read_that_is_given_up_while_it_waits_for_its_next_try_is_read_again(
    batch_size: int | None,
) -> None:
    waiting, trying_again = threading.Event(), True

    class Retried:
        def __len__(self) -> int:
            return 40

        def __getitem__(self, row: int) -> torch.Tensor:
            if row == 5 and trying_again:
                waiting.set()
                threading.current_thread().rest(200)  # as a transfer does
            return torch.full((1,), row)

    with EchoLoader(Retried(), batch_size, order="stored", num_workers=1, prefetch=4) as loader:
        iterator = iter(loader)
        rows = [int(next(iterator)) for _ in range(2)]
        assert waiting.wait(120)
        del iterator  # abandoned
        loader._pipeline.thread_pool.join()  # type: ignore[union-attr]
        trying_again = False
        assert rows + [int(batch) for batch in islice(loader, 8)] == list(range(10))


@pytest.mark.parametrize(("call", "message"), [("stop", "asking again goes on"), ("close", "closed")])
def test_stopping_elsewhere_while_the_next_batch_is_waited_for_says_so(call: str, message: str) -> None:
    go, reading = threading.Event(), threading.Event()

    class Slow(Dataset):
        def __getitem__(self, row: int) -> dict[str, Any]:
            if row == 4:
                reading.set()
                go.wait(200)
            return super().__getitem__(row)

    def elsewhere() -> None:
        reading.wait(120)
        time.sleep(0.1)  # the consumer waits by now, or finds it when it comes
        threading.Timer(0.2, go.set).start()
        getattr(loader, call)()

    with EchoLoader(Slow(30), 4, order="stored", num_workers=1) as loader:
        iterator = iter(loader)
        next(iterator)
        thread = threading.Thread(target=elsewhere)
        thread.start()
        with pytest.raises(RuntimeError, match=message):
            next(iterator)
        thread.join()
        if call == "stop":
            assert next(iterator)["label"].tolist() == [4, 5, 6, 7]
        else:
            with pytest.raises(RuntimeError, match="was closed"):
                next(iterator)


def test_the_next_batch_can_not_be_asked_for_by_who_has_paused_the_threads() -> None:
    with EchoLoader(Dataset(1000), 4, num_workers=1, prefetch=1) as loader:
        iterator, others = iter(loader), []
        next(iterator)
        with loader.paused(), loader.paused():
            with pytest.raises(RuntimeError, match="ask for it before or after that block"):
                next(iterator)
            # Another thread only waits for the end of the pause.
            thread = threading.Thread(target=lambda: others.extend(islice(iterator, 8)), daemon=True)
            thread.start()
        thread.join(120)
        assert len(others) == 8
        next(iterator)
    with EchoLoader(Dataset(1000), 4) as loader, loader.paused():
        next(iter(loader))  # inline there is no thread to wait for
