"""Around other libraries' loaders: after a resume each example is used as often as without, or refused."""

import io
import itertools
import random
import tarfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler

from adaecho import EchoLoader
from adaecho.echo.read.witness import Witnesses, fingerprint
from tests.echo.behaviour.test_around_data_loaders import Drawn
from tests.helpers import through_torch_save

ROWS, SIZE, PASSES = 400, 8, 3


def lawless() -> Any:
    """A generator function that draws from a global generator."""
    rows = random.sample(range(ROWS), ROWS)
    for start in range(0, ROWS, SIZE):
        yield torch.tensor(rows[start : start + SIZE])


class Lawful:
    """The same, from what it was told."""

    def set_epoch(self, number: int) -> None:
        self.number = number

    def __iter__(self) -> Any:
        rows = random.Random(self.number).sample(range(ROWS), ROWS)
        return iter([torch.tensor(rows[start : start + SIZE]) for start in range(0, ROWS, SIZE)])


def stateful_data_loader(_: Path) -> Any:
    reason = "pip install torchdata --no-deps"
    library = pytest.importorskip("torchdata.stateful_dataloader", reason=reason)
    return library.StatefulDataLoader(range(ROWS), SIZE, shuffle=True)


def nodes(_: Path, sampler: Any = None) -> Any:
    """By default with a sampler that knows its order again; the nodes' positions leave that to it."""
    library = pytest.importorskip("torchdata.nodes", reason="pip install torchdata --no-deps")
    rows = library.SamplerWrapper(sampler or DistributedSampler(range(ROWS), 1, 0))  # type: ignore[arg-type]
    return library.Loader(library.Mapper(library.Batcher(rows, SIZE), torch.tensor))


def grain(_: Path) -> Any:
    library = pytest.importorskip("grain", reason="pip install grain")
    return library.MapDataset.range(ROWS).seed(3).shuffle().batch(SIZE).to_iter_dataset()


def hugging_face(_: Path) -> Any:
    datasets = pytest.importorskip("datasets")
    stream = datasets.Dataset.from_dict({"row": range(ROWS)}).to_iterable_dataset(num_shards=4)
    return stream.shuffle(seed=1, buffer_size=20).batch(SIZE)


def write_shard(shard: Path, rows: range) -> None:
    if shard.exists():
        return
    with tarfile.open(shard, "w") as archive:
        for row in rows:
            member, content = tarfile.TarInfo(f"{row:04d}.cls"), str(row).encode()
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def web_dataset(folder: Path, *, shuffled: int, by_pass: bool = False) -> Any:
    webdataset = pytest.importorskip("webdataset", reason="pip install '.[trainers]'")
    shard = folder / "rows.tar"
    write_shard(shard, range(ROWS))
    opened = webdataset.WebDataset(str(shard), shardshuffle=False)
    if by_pass:  # it counts the passes by itself, in each process from the first on
        opened = opened.compose(webdataset.detshuffle(20))
    return opened.shuffle(shuffled).decode().to_tuple("cls").batched(SIZE)


def web_dataset_of_shards(folder: Path, **arguments: Any) -> Any:
    """Without a seed it draws one as it is made, for the order of its shards."""
    webdataset = pytest.importorskip("webdataset", reason="pip install '.[trainers]'")
    shards = [folder / f"rows-{number}.tar" for number in range(8)]
    for number, shard in enumerate(shards):
        write_shard(shard, range(number, ROWS, len(shards)))
    opened = webdataset.WebDataset(list(map(str, shards)), shardshuffle=8, **arguments)
    return opened.decode().to_tuple("cls").batched(SIZE)


def hugging_face_in_a_stateful_data_loader(_: Path) -> Any:
    datasets = pytest.importorskip("datasets")
    library = pytest.importorskip("torchdata.stateful_dataloader", reason="pip install torchdata --no-deps")
    stream = datasets.Dataset.from_dict({"row": range(ROWS)}).to_iterable_dataset(num_shards=4)
    return library.StatefulDataLoader(stream.shuffle(seed=1, buffer_size=20), SIZE)


EXACT: dict[str, Callable[[Path], Any]] = {
    "told of passes": lambda _: Lawful(),
    "StatefulDataLoader": stateful_data_loader,
    "nodes": nodes,
    "grain": grain,
    "Hugging Face stream": hugging_face,
    "Hugging Face stream in a StatefulDataLoader": hugging_face_in_a_stateful_data_loader,
    "WebDataset": lambda folder: web_dataset(folder, shuffled=0),
    "WebDataset, shuffled by pass": lambda folder: web_dataset(folder, shuffled=0, by_pass=True),
    "WebDataset, shards shuffled": web_dataset_of_shards,
    "WebDataset, shards shuffled by pass": lambda folder: web_dataset_of_shards(folder, detshuffle=True),
}
REFUSED: dict[str, Callable[[Path], Any]] = {
    "generator": lambda _: lawless,
    "nodes, with a sampler that draws anew": lambda folder: nodes(folder, RandomSampler(range(ROWS))),
    "WebDataset, shuffled": lambda folder: web_dataset(folder, shuffled=10),
}


def rows_of(batch: Any) -> list[int]:
    if isinstance(batch, dict):
        batch = batch["row"]
    elif isinstance(batch, tuple):
        (batch,) = batch
    return [int(row) for row in batch]


def uses(loader: EchoLoader, batches: int | None = None) -> list[int]:
    """Of each row, in the order they come."""
    return [row for batch in itertools.islice(loader, batches) for row in rows_of(batch)]


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore:'set_vital'")
@pytest.mark.parametrize("kind", EXACT)
def test_every_example_is_used_twice_in_each_pass_wherever_it_was_resumed(kind: str, tmp_path: Path) -> None:
    def make() -> EchoLoader:
        return EchoLoader(
            EXACT[kind](tmp_path), None, epochs=1, echo="batch", factor=2, batch_shuffle_buffer=4
        )

    steps = 2 * ROWS // SIZE
    with make() as loader:
        for number in range(PASSES):
            before, states = [], []
            for batch in loader:
                before.append(rows_of(batch))
                states.append(loader.state_dict())
            assert len(before) == steps
            # Every third position of the pass, each in another one: they are 100 apart.
            for position in range(number, steps - 1, 3 * PASSES):
                with make() as restored:
                    restored.load_state_dict(through_torch_save(states[position]))
                    rest = uses(restored)
                used = Counter(itertools.chain(*before[: position + 1], rest))
                assert Counter(used.values()) == {2: ROWS}


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore:'set_vital'")
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", REFUSED)
def test_what_comes_in_another_order_is_refused_with_the_remedy(
    kind: str, num_workers: int, tmp_path: Path
) -> None:
    def make() -> EchoLoader:
        source = REFUSED[kind](tmp_path)
        return EchoLoader(source, None, epochs=1, echo="batch", factor=2, num_workers=num_workers)

    for batches in (3, 50):
        with make() as loader, make() as restored:
            uses(loader, batches)
            remedy = "DistributedSampler" if "nodes" in kind else "shuffle_buffer="
            with pytest.raises(ValueError, match=rf"is another one than when .*set_epoch\(pass\).*{remedy}"):
                restored.load_state_dict(through_torch_save(loader.state_dict()))


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore:'set_vital'")
@pytest.mark.parametrize("kind", [stateful_data_loader, nodes, grain])
def test_what_tells_its_own_position_is_exact(kind: Callable[[Path], Any], tmp_path: Path) -> None:
    def make() -> EchoLoader:
        return EchoLoader(kind(tmp_path), None, epochs=1, echo="batch", factor=2)

    for batches in (9, 50, 77):
        with make() as loader, make() as restored:
            before = uses(loader, batches)
            restored.load_state_dict(through_torch_save(loader.state_dict()))
            assert restored.reread_examples <= (16 + 2) * SIZE  # from one answer to the next
            assert Counter(Counter(before + uses(restored)).values()) == {2: ROWS}


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_shards_of_a_web_dataset_are_shuffled_by_the_loaders_seed_and_rank(tmp_path: Path) -> None:
    def first_rows(**seeds: int) -> list[int]:
        source = web_dataset_of_shards(tmp_path, detshuffle=True, seed=3)
        seeds = {"rank": 0, **seeds}
        with EchoLoader(source, None, epochs=1, world_size=8, **seeds) as loader:
            return uses(loader)[:: ROWS // 8]

    orders = [first_rows(), first_rows(), first_rows(seed=1), first_rows(rank=1)]
    assert orders[0] == orders[1]
    assert len(set(map(tuple, orders))) == 3


class LawlessStream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(random.sample(range(ROWS), ROWS))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:'set_vital'")
def test_where_a_stateful_data_loader_cannot_go_back_a_data_loader_can() -> None:
    library = pytest.importorskip("torchdata.stateful_dataloader", reason="pip install torchdata --no-deps")
    answers = []
    for kind in (library.StatefulDataLoader, DataLoader):
        made = [EchoLoader(kind(LawlessStream(), SIZE), None, epochs=1, echo="batch", factor=2) for _ in "ab"]
        before = uses(made[0], 9)
        try:
            made[1].load_state_dict(through_torch_save(made[0].state_dict()))
            answers.append(str(Counter(Counter(before + uses(made[1])).values())))
        except ValueError as error:
            answers.append(str(error))
    assert "Give a DataLoader of torch with the same arguments in its place" in answers[0]
    assert answers[1] == str(Counter({2: ROWS}))


def test_examples_are_compared_as_batches_are() -> None:
    def rows() -> Any:
        return iter(random.sample(range(ROWS), ROWS))

    loader = EchoLoader(rows, 8, shuffle_buffer=16)
    uses(loader, 9)
    with pytest.raises(ValueError, match="is another one than when the state was saved"):
        EchoLoader(rows, 8, shuffle_buffer=16).load_state_dict(loader.state_dict())


def test_the_first_examples_of_each_pass_are_compared() -> None:
    def rows() -> Any:
        return iter(random.sample(range(ROWS + 5), ROWS + 5))

    def make() -> EchoLoader:
        return EchoLoader(rows, 8, epochs=1, echo="batch", factor=2)

    loader = make()
    uses(loader)
    uses(loader, 2)
    with pytest.raises(ValueError, match="is another one than when the state was saved"):
        make().load_state_dict(loader.state_dict())


def test_contents_that_a_thread_draws_for_the_same_rows_are_warned_of() -> None:
    def make() -> EchoLoader:
        data_loader: DataLoader[Any] = DataLoader(Drawn(), 8, shuffle=True)
        return EchoLoader(data_loader, None, epochs=1, echo="batch", factor=2, num_workers=1)

    with make() as loader, make() as restored:
        next(iter(loader))
        with pytest.warns(UserWarning, match="other contents than before, of the same rows.*num_workers=1"):
            restored.load_state_dict(loader.state_dict())


def padded(rows: int, columns: int, other: int) -> torch.Tensor:
    """A batch that tells nothing at even spacing: every row begins alike and ends in padding."""
    batch = torch.zeros(rows, columns, dtype=torch.int64)
    batch[:, 1 : columns // 5] = (torch.arange(rows * (columns // 5 - 1)).view(rows, -1) + other) % 2
    return batch


def test_a_state_holds_the_last_few_witnesses() -> None:
    witnesses = Witnesses(spacing=4, world=2)
    for serial in range(1, 5000, 2):
        witnesses.add(serial, serial, serial)
    kept = witnesses.before(4990)
    assert [serial for serial, _ in kept] == list(range(4985 - 31 * 8, 4990, 8))
    assert [serial for serial, _ in witnesses.before(64)] == list(range(1, 64, 2)), "each of the first"
    again = Witnesses(spacing=4, world=2)
    again.expect(kept)
    assert again.before(4990) == kept
    assert again.is_as_before(4985, 4985)
    assert not again.is_as_before(4977, 4985)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.arange(9), torch.arange(9).flip(0)),
        (np.zeros((3, 4)), np.zeros((4, 3))),
        ([1, 2, 3], [1, 3, 2]),
        ({"a": 1, "b": 2}, {"a": 2, "b": 1}),
        (b"abc", b"abd"),
        ("text", "test"),
        (torch.zeros(3, dtype=torch.float32), torch.zeros(3, dtype=torch.float64)),
        (np.array(["a", None], dtype=object), np.array(["b", None], dtype=object)),
        (random.Random, np.random),
        (torch.ones(4, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.bfloat16)),
        (torch.eye(4).to_sparse(), torch.eye(4).flip(0).to_sparse()),
        (Image.new("L", (8, 8), 1), Image.new("L", (8, 8), 2)),
        (SimpleNamespace(rows=torch.ones(3)), SimpleNamespace(rows=torch.zeros(3))),
        (padded(64, 512, 0), padded(64, 512, 1)),
        (padded(64, 784, 0), padded(64, 784, 1)),
    ],
)
def test_a_fingerprint_is_one_of_content(one: Any, other: Any) -> None:
    assert fingerprint(one) != fingerprint(other)
    assert fingerprint(one) == fingerprint(one) < 1 << 56


def test_a_fingerprint_looks_at_little_of_what_is_large() -> None:
    large = torch.zeros(1 << 22)
    assert fingerprint([large.view(64, -1).T] * 1000) == fingerprint([large.view(64, -1).T] * 1000)
    assert fingerprint(torch.zeros(3, dtype=torch.bfloat16)) != fingerprint(
        torch.zeros(4, dtype=torch.bfloat16)
    )


class Opaque:
    """A batch that shows nothing."""

    def __len__(self) -> int:
        return SIZE


def test_a_state_of_what_cannot_be_compared_is_warned_of() -> None:
    loader = EchoLoader(lambda: (Opaque() for _ in range(9)), None, epochs=1, echo="batch", factor=2)
    next(iter(loader))
    with pytest.warns(UserWarning, match="nothing in what the source gives can be compared"):
        loader.state_dict()
