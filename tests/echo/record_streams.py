"""240 streams of features that the mini loader lacks, recorded as digests.

``python -m tests.echo.record_streams`` writes ``streams.json`` again if a change intends other streams.
Runs and records depend on the streams. All values are integers, so digests are the same on every machine.
"""

import hashlib
import json
import random
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils import data

from adaecho import EchoLoader
from adaecho.echo.order import keyed
from tests.echo.sources import memory_map

RECORDED = Path(__file__).with_name("streams.json")
BATCHES, RESUMED = 14, 5  # batches of each stream, and after its resume


class Pair(NamedTuple):
    x: np.ndarray
    label: int


FORMS: dict[str, Callable[[int], Any]] = {
    "dict": lambda row: {"x": np.arange(3) + 10 * row, "label": row},
    "tuple": lambda row: (np.arange(2, dtype=np.int16) + row, row),
    "array": lambda row: np.arange(4, dtype=np.int32) * (row + 1),
    "nested": lambda row: {"in": (np.arange(2) + row, [row, -row]), "label": row, "text": f"row {row}"},
    "named tuple": lambda row: Pair(np.arange(2, dtype=np.int16) + row, row),
}
OF_ARRAYS = ["dict", "tuple", "array"]
as_dict, nested = FORMS["dict"], FORMS["nested"]


def ragged(row: int) -> Any:
    return {"x": np.arange(row % 4 + 1) + row, "label": row}


def as_lists(examples: list[Any]) -> Any:
    return [plain(one) for one in examples]


def with_drawn(one: Any, number: Any) -> Any:
    """Add random numbers to an example or to arrays of examples."""
    if isinstance(one, dict):
        return {**one, "label": one["label"] * 1000 + number}
    if isinstance(one, Pair):
        return one._replace(label=one.label * 1000 + number)
    if isinstance(one, tuple):
        return (*one[:-1], one[-1] * 1000 + number)
    return one * 1000 + number


def draws(one: Any, rng: np.random.Generator) -> Any:
    return with_drawn(one, int(rng.integers(0, 1000)))


def draws_globally(one: Any) -> Any:
    numbers = int(torch.randint(10, ())), random.randrange(10), int(np.random.randint(10))
    return with_drawn(one, int("".join(map(str, numbers))))


class DrawsInBlocks:
    """A vectorized augmentation."""

    def block(self, arrays: Any, keys: Any) -> Any:
        drawn = keyed.integers(keys, 0, 0, 1000)
        return with_drawn(arrays, drawn[:, None] if isinstance(arrays, np.ndarray) else drawn)


class Decode:
    def __init__(self, form: str, bad: frozenset[int] = frozenset()) -> None:
        self.make, self.bad = FORMS[form], bad

    def __call__(self, row: Any) -> Any:
        if int(row) in self.bad:
            raise ValueError(f"row {row} is bad")
        return self.make(int(row))


class Rows:
    thread_safe = True

    def __init__(self, length: int, make: Callable[[int], Any] = int) -> None:
        self.length, self.make = length, make

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, row: int) -> Any:
        if not 0 <= row < self.length:
            raise IndexError(row)
        return self.make(row)


class Shards(Rows):
    @property
    def shard_lengths(self) -> list[int]:
        half, quarter = self.length // 2, self.length // 4
        return [half, 0, quarter, self.length - half - quarter]


class Fetched(Rows):
    def __getitems__(self, rows: list[int]) -> list[Any]:
        return [self[row] for row in rows]


class Stream(data.IterableDataset[Any]):
    def __init__(self, length: int, make: Callable[[int], Any] = int) -> None:
        self.length, self.make = length, make

    def __iter__(self) -> Iterator[Any]:
        return (self.make(row * 7 % self.length) for row in range(self.length))


def columns(form: str, length: int) -> Any:
    rows = np.arange(length)
    fields = {"x": rows[:, None] * 10 + np.arange(3), "label": rows}
    return {"dict": fields, "tuple": tuple(fields.values()), "array": fields["x"]}[form]


# Each function draws a setting: a function that makes the source, and arguments.
# The names of these functions seed the settings.

Setting = tuple[Callable[[], Any], dict[str, Any]]


def echo(draw: random.Random, *, of_batches: bool = False, after: bool = True) -> dict[str, Any]:
    names = ["batch"] if of_batches else ["example_before_augmentation", "batch"]
    name = draw.choice(["none", *names, *["example_after_augmentation"] * (after and not of_batches)])
    if name == "none":
        return {"echo": name}
    given = {"echo": name, "factor": draw.choice([1, 2, 3, 1.5, 2.7])}
    if name == "batch":
        given["batch_shuffle_buffer"] = draw.choice([0, 0, 2, 5])
    return given


def common(draw: random.Random, *, ranks: bool = True, epochs: bool = True) -> dict[str, Any]:
    world = draw.choice([1, 1, 2, 3]) if ranks else 1
    given: dict[str, Any] = {
        "batch_size": draw.choice([1, 3, 4, 7]), "shuffle_buffer": draw.choice([0, 1, 6, 17]),
        "seed": draw.randrange(1 << 40), "rank": draw.randrange(world), "world_size": world,
    }  # fmt: skip
    if epochs and draw.random() < 0.5:
        given |= {"epochs": draw.choice([1, 2]), "drop_last": draw.random() < 0.4}
    return given


def augment_of(draw: random.Random, form: str) -> dict[str, Any]:
    return {} if form == "nested" else {"augment": draw.choice([None, draws])}


def bad_examples(draw: random.Random) -> Setting:
    length, form = draw.choice([29, 64]), draw.choice(list(FORMS))
    bad = frozenset(draw.sample(range(length), draw.choice([1, 3, 6])))
    given = {**echo(draw), **common(draw), "decode": Decode(form, bad), "max_bad_examples": 60}
    given |= augment_of(draw, form)
    if given["echo"] != "example_after_augmentation":
        given["buffer_format"] = draw.choice(["decoded", "decoded", "encoded"])
    if "epochs" in given:
        given |= {"rank": 0, "world_size": 1}
    kind = draw.choice([Rows, Rows, Shards, Stream])
    return lambda: kind(length), given


def iterated(draw: random.Random) -> Setting:
    length, form = draw.choice([19, 40]), draw.choice(list(FORMS))
    given = {**echo(draw), **common(draw, epochs=False)}
    if given["world_size"] == 1:
        given |= common(draw, ranks=False)
    given |= augment_of(draw, form)
    make = FORMS[form]
    if draw.random() < 0.5:
        return lambda: Stream(length, make), given
    return lambda: lambda: map(make, range(length)), given


def orders(draw: random.Random) -> Setting:
    length, form = draw.choice([30, 45]), draw.choice(OF_ARRAYS)
    given = {**echo(draw), **common(draw)}
    given["order"] = draw.choice(["shards", "shards", "sequential", "permutation"])
    kind = Shards if given["order"] == "shards" else draw.choice([Rows, Fetched])
    return lambda: kind(length, FORMS[form]), {**given, **augment_of(draw, form)}


def sampled(draw: random.Random) -> Setting:
    length, given = draw.choice([20, 33]), {**echo(draw), **common(draw)}
    samplers: list[Callable[[], Any]] = [
        lambda: data.SequentialSampler(range(length)),
        lambda: data.RandomSampler(range(length)),
        lambda: data.RandomSampler(range(length), replacement=True, num_samples=length + 5),
        lambda: data.SubsetRandomSampler(range(0, length, 2)),
        lambda: range(length - 1, -1, -1),
    ]
    # Each loader needs its own sampler
    return lambda: Rows(length, as_dict), {**given, "sampler": draw.choice(samplers)}


def others(draw: random.Random) -> Setting:
    length = draw.choice([24, 50])
    kinds: list[Callable[[], Any]] = [
        lambda: memory_map({"x": columns("array", length)})["x"],
        lambda: data.TensorDataset(torch.arange(length), torch.arange(2 * length).reshape(length, 2)),
        lambda: data.Subset(Rows(2 * length, as_dict), range(1, 2 * length, 2)),
        lambda: torch.arange(length, dtype=torch.int32),
        lambda: [as_dict(row) for row in range(length)],
        lambda: {"x": torch.arange(length * 3).reshape(length, 3), "label": np.arange(length)},
    ]
    return draw.choice(kinds), {**echo(draw), **common(draw)}


def around_data_loaders(draw: random.Random) -> Setting:
    length, size, seed = draw.choice([22, 40]), draw.choice([3, 5]), draw.randrange(100)
    rows = partial(Rows, length, FORMS[draw.choice(OF_ARRAYS)])
    makers: list[Callable[[], Any]] = [
        lambda: data.DataLoader(rows(), size),
        lambda: data.DataLoader(rows(), size, shuffle=True),
        lambda: data.DataLoader(rows(), size, shuffle=True, drop_last=True),
        lambda: data.DataLoader(rows(), size, shuffle=True, generator=torch.Generator().manual_seed(seed)),
        lambda: data.DataLoader(
            rows(), batch_sampler=data.BatchSampler(data.SubsetRandomSampler(range(length)), size, False)
        ),
        lambda: data.DataLoader(rows(), size, sampler=data.SequentialSampler(range(length))),
    ]
    return draw.choice(makers), whole_batches(draw)


def around_batches(draw: random.Random) -> Setting:
    number, size = draw.choice([9, 16]), draw.choice([2, 4])

    def batch(index: int) -> Any:
        return {"x": torch.arange(size + index % 2) + 100 * index, "label": torch.arange(size + index % 2)}

    makers: list[Callable[[], Any]] = [
        lambda: Rows(number, batch),
        lambda: Stream(number, batch),
        lambda: [batch(index) for index in range(number)],
        lambda: lambda: map(batch, range(number)),
    ]
    return draw.choice(makers), whole_batches(draw)


def whole_batches(draw: random.Random) -> dict[str, Any]:
    given = {**echo(draw, of_batches=True), "batch_size": None, "seed": draw.randrange(1 << 40)}
    if draw.random() < 0.5:
        given["epochs"] = draw.choice([1, 2])
    return given


def in_blocks(draw: random.Random) -> Setting:
    length, form = draw.choice([31, 300]), draw.choice(OF_ARRAYS)
    given = {**echo(draw), **common(draw), "augment": DrawsInBlocks()}
    if draw.random() < 0.5:
        return lambda: columns(form, length), given
    return lambda: Rows(length, FORMS[form]), given


def of_one_argument(draw: random.Random) -> Setting:
    form = draw.choice(OF_ARRAYS)
    augment = draw.choice([draws_globally, draws_globally, (draws_globally, draws), (draws, draws_globally)])
    return lambda: Rows(26, FORMS[form]), {**echo(draw), **common(draw), "augment": augment}


def in_two_parts(draw: random.Random) -> Setting:
    form = draw.choice(OF_ARRAYS)
    augment = tuple(draw.choice([draws, DrawsInBlocks()]) for _ in range(2))
    kind = draw.choice([Rows, Shards, Stream])
    given = {**echo(draw), **common(draw, epochs=kind is not Stream), "augment": augment}
    return lambda: kind(28, FORMS[form]), given


def places(draw: random.Random) -> Setting:
    length, form = draw.choice([25, 60]), draw.choice([*OF_ARRAYS, "named tuple"])
    given = {**echo(draw, after=False), **common(draw), "decode": Decode(form)}
    given |= {"buffer_format": draw.choice(["decoded", "encoded", "encoded", "auto"])}
    given["augment"] = draw.choice([None, draws, draws_globally])
    kind = draw.choice([Rows, Fetched, Stream])
    if kind is Stream and given["world_size"] > 1:
        given |= {"epochs": None, "drop_last": False}
    return lambda: kind(length), given


def collated(draw: random.Random) -> Setting:
    form = draw.choice([*FORMS.values(), ragged, ragged])
    given = {**echo(draw), **common(draw), "collate": as_lists}
    if form is not nested:
        given["augment"] = draw.choice([None, draws])
    return lambda: Rows(27, form), given


def long(draw: random.Random) -> Setting:
    """Sources so long that the permutation is computed row by row."""
    length = draw.choice([1 << 22, 5_000_000_000])
    return lambda: Rows(length, as_dict), {**echo(draw), **common(draw), **augment_of(draw, "dict")}


COUNTS = {
    bad_examples: 32, iterated: 24, orders: 24, sampled: 16, others: 18, around_data_loaders: 36,
    around_batches: 16, in_blocks: 16, of_one_argument: 10, in_two_parts: 16, places: 16, collated: 12,
    long: 4,
}  # fmt: skip
ABOUT = {about.__name__: about for about in COUNTS}
NAMES = [f"{about.__name__} {number}" for about, count in COUNTS.items() for number in range(count)]


def setting(name: str) -> Setting:
    draw = random.Random(name)
    make, given = ABOUT[name.split()[0]](draw)
    parts = given.get("augment") if isinstance(given.get("augment"), tuple) else (given.get("augment"),)
    # Code that uses the global generators would start processes
    most = 0 if draws_globally in parts else 2
    return make, {"num_workers": max(draw.randint(-2, most), 0), "prefetch": draw.randrange(4), **given}


def plain(value: Any) -> Any:
    """Convert arrays and containers to lists that start with their types."""
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [type(value).__name__, *map(plain, value)]
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), value.tolist()]
    if isinstance(value, np.ndarray | np.generic):
        return [f"numpy {value.dtype}", value.tolist()]
    return value


def taken(loader: EchoLoader, count: int) -> Iterator[str]:
    """Yield the next batches over several iterations, each with its counts."""
    while count > 0:
        before = count
        for batch in islice(loader, count):
            bad = [(one["index"], one["row"]) for one in loader.bad_examples]
            yield json.dumps([plain(batch), loader.fresh_examples, bad])
            count -= 1
        assert count < before, "an iteration without a batch"


def digest(name: str) -> str:
    make, given = setting(name)
    stop = random.Random(name + ", resumed").randrange(BATCHES - RESUMED)

    def loader(**more: Any) -> EchoLoader:
        own = {"sampler": given["sampler"]()} if callable(given.get("sampler")) else {}
        return EchoLoader(make(), **{**given, **own, **more})

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with loader() as whole:
            batches, state = [], whole.state_dict()
            for batch in taken(whole, BATCHES):
                batches.append(batch)
                if len(batches) == stop:
                    state = whole.state_dict()
        with loader(num_workers=0) as resumed:
            resumed.load_state_dict(state)
            again = list(taken(resumed, RESUMED))
    for number, one in enumerate(again):
        assert one == batches[stop + number], f"{name}, batch {stop + number}, resumed after {stop}: {given}"
    return hashlib.sha256("\n".join(batches).encode()).hexdigest()[:12]


if __name__ == "__main__":
    RECORDED.write_text(json.dumps({name: digest(name) for name in NAMES}, indent=0) + "\n")
    print(f"{len(NAMES)} streams recorded in {RECORDED}")
