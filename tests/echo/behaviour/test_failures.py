"""Errors of machine and network are raised, those of an example counted; all name what they are about."""

import errno
import http.client
import io
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest

from adaecho import EchoLoader
from adaecho.echo.read.chunks import is_of_machine
from adaecho.echo.variants import VARIANTS
from tests.echo.behaviour.test_split_augmentation import fail
from tests.echo.record_streams import Fetched
from tests.echo.sources import Dataset, Stream, arrays


def raised(action: Callable[[], Any]) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011 (whatever it is)
        action()
    assert isinstance(caught.value, Exception)
    return caught.value


OF_MACHINE: list[Exception] = [
    urllib.error.URLError("connection reset"), http.client.IncompleteRead(b"", 7), MemoryError(),
    socket.gaierror(socket.EAI_NONAME, "Name or service not known"), ConnectionResetError("peer went away"),
    ssl.SSLCertVerificationError(1, "certificate has expired"),
    *(OSError(number, "of the machine") for number in (errno.EIO, errno.EMFILE, errno.ENOSPC, errno.ESTALE)),
]  # fmt: skip
OF_THE_EXAMPLE = [OSError("truncated"), OSError(errno.EINVAL, "seek"), KeyError("x")]


@pytest.mark.parametrize("error", [*OF_MACHINE, *OF_THE_EXAMPLE], ids=repr)
def test_what_is_of_machine_and_network(error: Exception) -> None:
    assert is_of_machine(error) == (error in OF_MACHINE)


def test_a_truncated_image_is_a_bad_example() -> None:
    image = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(file, "JPEG")
    truncated = raised(lambda: image.open(io.BytesIO(file.getvalue()[:-700])).load())
    assert isinstance(truncated, OSError)
    assert not is_of_machine(truncated)
    assert not is_of_machine(raised(lambda: image.open(io.BytesIO(b"no image"))))


def test_network_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    unserved = "http://127.0.0.1:9/"
    assert is_of_machine(raised(lambda: urllib.request.urlopen(unserved, timeout=5)))
    requests = pytest.importorskip("requests")
    error = raised(lambda: requests.get(unserved, timeout=5))
    assert isinstance(error, OSError)
    assert error.errno is None
    assert is_of_machine(error)
    assert is_of_machine(requests.exceptions.ChunkedEncodingError())
    assert not is_of_machine(requests.exceptions.JSONDecodeError("no json", "", 0))
    urllib3 = pytest.importorskip("urllib3")
    assert is_of_machine(raised(lambda: urllib3.PoolManager(retries=False).request("GET", unserved)))
    assert is_of_machine(pytest.importorskip("httpx").ReadTimeout("too slow"))
    assert is_of_machine(pytest.importorskip("aiohttp").ServerDisconnectedError())


def failing(error: Exception) -> Any:
    def read(row: int) -> int:
        if row == 3:
            raise error
        return row

    return read


@pytest.mark.parametrize("workers", [{}, {"num_workers": 2}, {"num_workers": 2, "processes": True}], ids=str)
def test_a_loader_raises_or_counts(workers: dict[str, Any]) -> None:
    """Alone, or asked for together with others."""
    common: dict[str, Any] = {"batch_size": 4, "order": "stored", "max_bad_examples": 8, **workers}
    read = failing(OSError(errno.EMFILE, "Too many open files"))
    for given in ({"source": Fetched(8, read)}, {"source": range(8), "decode": read}):
        loader = EchoLoader(**given, **common)
        with loader, pytest.raises(OSError, match="Too many open files") as caught:
            next(iter(loader))
        assert "while reading" in caught.value.__notes__[0]
        assert loader.bad_examples == []
    with EchoLoader(Fetched(8, failing(OSError("broken data stream"))), **common) as loader:
        assert next(iter(loader)).tolist() == [0, 1, 2, 4]
        assert len(loader.bad_examples) == 1


def caught(source: Any, batch_size: int = 3, **arguments: Any) -> str:
    """The error that the first two batches end in, with its notes."""
    arguments = {"order": "stored", **arguments}
    with EchoLoader(source, batch_size, **arguments) as loader, pytest.raises(Exception) as raised:  # noqa: PT011
        for _ in zip(range(2), loader, strict=False):
            pass
    return "\n".join([str(raised.value), *raised.value.__notes__])


def decode_ones(row: int) -> dict[str, int]:
    if row != 1:
        raise ValueError(f"row {row} is bad")
    return {"row": row}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("source", [[2] * 30, lambda: iter([2] * 30)], ids=["rows", "iterated"])
def test_a_source_of_bad_examples_alone_ends_within_any_budget(source: Any, num_workers: int) -> None:
    told = caught(source, decode=decode_ones, max_bad_examples=100, num_workers=num_workers)
    assert "were all bad" in told


def test_one_good_example_among_many_bad_ones_is_found_in_each_pass() -> None:
    rows = [2] * 800 + [1] + [2] * 800
    loader = EchoLoader(rows, 1, decode=decode_ones, max_bad_examples=1600)
    assert [int(batch["row"]) for batch in islice(loader, 4)] == [1] * 4
    assert len(loader.bad_examples) == 1600


def no_five(example: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    if example["label"] == 5:
        raise KeyError(f"no five {rng.random()}")
    return example


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("augment", [no_five, fail])
@pytest.mark.parametrize("echo", VARIANTS)
def test_the_example_that_an_augment_fails_at(augment: Any, echo: str, num_workers: int) -> None:
    common: dict[str, Any] = {"augment": augment, "echo": echo, "num_workers": num_workers}
    assert "while augmenting example 5 of Dataset" in caught(Dataset(9), **common)
    if not num_workers:  # where it could be a process, which takes seconds to start
        assert "while augmenting row 5 of the source" in caught(arrays(9), **common)


def test_the_row_is_the_permuted_one_and_a_stream_counts() -> None:
    common: dict[str, Any] = {"augment": no_five}
    assert "while augmenting example 5 of Dataset" in caught(Dataset(6), order="permutation", **common)
    assert "augmenting example 5 (counted from 0 over all passes) of Stream" in caught(Stream(9), **common)
    assert "augmenting example 5 of Dataset" in caught(Dataset(9), decode=dict, place="encoded", **common)


def test_a_block_names_the_first_and_the_last() -> None:
    class Block:
        def block(self, fields: Any, _: Any) -> Any:
            if 5 in fields["label"]:
                raise KeyError("no five")
            return fields

    named = "while augmenting 3 examples, from example 3 of Dataset to example 5 of Dataset"
    assert named in caught(Dataset(9), augment=Block())


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_collate_names_the_first_and_the_last(num_workers: int) -> None:
    def collate(examples: list[Any]) -> Any:
        raise KeyError(len(examples))

    for source, name in ((Dataset(9), "example {} of Dataset"), (arrays(9), "row {} of the source")):
        named = f"while collating 3 examples, from {name.format(0)} to {name.format(2)}"
        for echo in VARIANTS:
            assert named in caught(source, collate=collate, echo=echo, num_workers=num_workers)
    assert "while collating example 0 of Dataset" in caught(Dataset(9), 1, collate=collate)


def test_shapes_that_differ_are_named_with_their_examples() -> None:
    def sizes() -> Iterator[Any]:
        for row in range(9):
            yield {"x": np.zeros(3 + (row == 4))}

    for num_workers in (0, 2):
        told = caught(sizes, num_workers=num_workers)
        assert "shapes, (3,) and (4,)" in told
        assert "while collating 3 examples, from example 3 (counted from 0 over all passes) of sizes" in told


@pytest.mark.parametrize("echo", ["example_before_augmentation", "batch"])
def test_states_of_an_earlier_epoch_know_its_bad_examples(echo: str) -> None:
    """Those of the later one, which was read before, come after them."""

    def decode(row: dict[str, Any]) -> dict[str, Any]:
        if row["label"] % 20 == 7:
            raise ValueError("cannot decode")
        return row

    def make() -> EchoLoader:
        settings: dict[str, Any] = {"factor": 2, "shuffle_buffer": 100, "epochs": 1, "max_bad_examples": 50}
        return EchoLoader(Dataset(1000), 8, echo=echo, decode=decode, **settings)

    loader = make()
    loader.set_epoch(1)
    list(loader)
    loader.set_epoch(0)
    states, batches = [], []
    for batch in loader:
        batches.append(batch["label"].tolist())
        states.append(loader.state_dict())
    assert len(loader.bad_examples) == 50
    for number in range(0, len(states) - 1, 24):
        resumed = make()
        resumed.load_state_dict(states[number])
        assert [batch["label"].tolist() for batch in resumed] == batches[number + 1 :]
