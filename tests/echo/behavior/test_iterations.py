"""Epochs after errors, with several iterators, and in a forked process."""

import subprocess
import sys
from typing import Any

import pytest
from torch.utils.data import DataLoader

from adaecho import EchoLoader
from tests.echo.others import plain
from tests.echo.sources import IDS, SOURCES, VARIANTS, Broken, Dataset, labels

WORKERS = pytest.mark.parametrize("num_workers", [0, 2])


@WORKERS
@pytest.mark.parametrize("epochs", [1, None])
@pytest.mark.parametrize("variant", VARIANTS[::3], ids=IDS[::3])
def test_a_loader_continues_after_an_error(
    variant: dict[str, Any], epochs: int | None, num_workers: int
) -> None:
    common: dict[str, Any] = {"epochs": epochs, "order": "sequential", "num_workers": num_workers, **variant}
    common["shuffle_buffer"] = 0 if epochs else 3
    source, taken = Broken(20, *range(10, 20), error=ConnectionError), list[list[int]]()
    with EchoLoader(source, 4, **common) as loader, EchoLoader(Dataset(20), 4, **common) as sound:
        iterator = iter(loader)
        with pytest.raises(ConnectionError):
            taken.extend(batch["label"].tolist() for batch in iterator)
        with pytest.raises(RuntimeError, match=r"\(ConnectionError\); iter\(loader\) continues") as caught:
            next(iterator)
        assert isinstance(caught.value.__cause__, ConnectionError)
        source.bad = ()
        if epochs is None:
            del iterator
            taken += labels(loader, 8)
            assert taken == labels(sound, len(taken))
        else:
            list(sound)
            assert labels(loader) == labels(sound)


FORK = """
import os, sys
from adaecho import EchoLoader

def result(use):
    try:
        use()
        return "accepted"
    except RuntimeError as error:
        return "refused" if "was forked" in str(error) else str(error)

loader = EchoLoader(range(1000), 4, num_workers=2)
next(iter(loader))
child = os.fork()
if not child:
    for use in (lambda: next(iter(loader)), loader.state_dict, lambda: loader.load_state_dict({})):
        print(result(use), flush=True)
    sys.exit(0)  # not os._exit: the exit handlers must not wait
assert os.waitpid(child, 0)[1] == 0
next(iter(loader))
"""


def test_a_forked_child_is_refused_and_ends() -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr, done.stdout.split()) == (0, "", ["refused"] * 3)


@WORKERS
@pytest.mark.parametrize("where", ["decode", "augment", "collate", "source"])
def test_a_stop_iteration_in_user_code_is_an_error(where: str, num_workers: int) -> None:
    def stop(*_: Any) -> Any:
        return next(iter(()))

    source = Broken(10, 5, error=StopIteration) if where == "source" else Dataset(10)
    stages: dict[str, Any] = {} if where == "source" else {where: stop}
    with EchoLoader(source, 2, num_workers=num_workers, order="sequential", **stages) as loader:
        for _ in range(2):  # the loader tries the next batch again
            with pytest.raises(RuntimeError, match="raised StopIteration") as caught:
                labels(loader, 10)
            assert isinstance(caught.value.__cause__, StopIteration)


@pytest.mark.parametrize("kind", ["map", "stream", "batches"])
@WORKERS
def test_an_abandoned_epoch_is_followed_by_a_full_one(kind: str, num_workers: int) -> None:
    """Prefetched examples do not count."""
    common: dict[str, Any] = {"epochs": 1, "num_workers": num_workers}
    if kind == "batches":
        batches = DataLoader(list(range(10)), batch_size=4)  # type: ignore[arg-type]
        loader, fresh = EchoLoader(batches, None, echo="batch", factor=2, **common), 4
    else:
        loader, fresh = EchoLoader(SOURCES[kind][0](10), 4, order="sequential", shuffle_buffer=2, **common), 6
    next(iter(loader))
    assert loader.fresh_examples == fresh
    rows = [row for batch in plain(list(loader)) for row in (batch if kind == "batches" else batch["label"])]
    assert sorted(rows) == sorted([*range(10)] * (2 if kind == "batches" else 1))
    assert loader.fresh_examples == fresh + 10
