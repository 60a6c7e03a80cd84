"""Data that changed between a stop and its resume: refused by the name of the file, unless one says so."""

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from adaecho.config.schema import Config, from_plain, to_plain
from adaecho.errors import DataError, FolderError
from adaecho.training.trial import run_trial
from tests.conftest import Compose
from tests.datasets.cifar10_files import encode, random_images, write_parquet

IMAGES, LABELS = random_images(40), [number % 10 for number in range(40)]
CIFAR10 = (
    "task=cifar10", "task.depth=8", "task.channels=2", "batch_size=4", "echo.shuffle_buffer=4",
    "evaluate.every_fresh_examples=8", "max_fresh_examples=16", "precision=float32", "target.value=null",
)  # fmt: skip
IMAGENET = (
    "task=imagenet", "task.model=test_resnet", "task.image_size=32", "batch_size=4", "task.ghost_size=null",
    "echo.shuffle_buffer=4", "evaluate.every_fresh_examples=8", "max_fresh_examples=16", "precision=float32",
    "target.value=null", "data.validation_examples=8",
)  # fmt: skip


def parquet(folder: Path, labels: list[int]) -> None:
    for number, rows in enumerate((slice(20), slice(20, None))):
        encoded = [encode(image) for image in IMAGES[rows]]
        write_parquet(folder / f"train-{number}.parquet", encoded, list(labels[rows]))


def shards(folder: Path, labels: list[int]) -> None:
    folder.mkdir(exist_ok=True)
    for number, name in enumerate(("train-0", "train-1", "val-0", "test-0")):
        with tarfile.open(folder / f"{name}.tar", "w") as archive:
            for row in range(number * 10, number * 10 + 10):
                for ending, content in (("png", encode(IMAGES[row])), ("cls", b"%d" % labels[row])):
                    member = tarfile.TarInfo(f"{row:03d}.{ending}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))


def photographs(folder: Path, labels: list[int]) -> None:
    for row, label in enumerate(labels):
        place = folder / f"class-{row % 2}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{row}.png").write_bytes(encode(IMAGES[row][:, :: 1 - 2 * (label % 2)]))


DATA: dict[str, tuple[Callable[[Path, list[int]], None], tuple[str, ...], str]] = {
    "parquet": (parquet, (*CIFAR10, "data.validation_examples=8"), "train-1.parquet"),
    "shards": (shards, (*CIFAR10, "data.validation_examples=null"), "test-0.tar"),
    "photographs": (photographs, IMAGENET, "39.png"),
}


def more(config: Config, fresh_examples: int, *, allowed: bool = False) -> Config:
    """The same run with a larger budget."""
    plain = to_plain(config)
    data = {**plain["data"], "allow_changed": allowed}
    return from_plain({**plain, "max_fresh_examples": fresh_examples, "data": data})


@pytest.fixture
def begin(compose_config: Compose, tmp_path: Path) -> Callable[[str], Config]:
    """Trains on data of that form; what with."""

    def run(form: str) -> Config:
        write, overrides, _ = DATA[form]
        write(tmp_path / "data", LABELS)
        config = compose_config(*overrides, f"data.path={tmp_path / 'data'}")
        run_trial(config, tmp_path / "run")
        return config

    return run


@pytest.mark.parametrize("form", DATA)
def test_a_resume_with_other_labels_of_equal_length_names_the_file(
    begin: Callable[[str], Config], tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write, _, name = DATA[form]
    longer = more(begin(form), 24)
    sizes = {path: path.stat().st_size for path in (tmp_path / "data").rglob("*.*")}

    write(tmp_path / "data", [*LABELS[:-1], 0 if LABELS[-1] != 0 else 1])
    if form != "photographs":
        assert {path: path.stat().st_size for path in sizes} == sizes
    changed = rf"trained with \S*{name} \(.* bytes, sha256 \w+\), and here, in .*, it is"
    with pytest.raises(FolderError, match=changed):
        run_trial(longer, tmp_path / "run")

    write(tmp_path / "data", LABELS)
    if form == "shards":
        (tmp_path / "data" / name).rename(tmp_path / "elsewhere")
        with pytest.raises(FolderError, match=rf"{name} \(.*\), and here, in .*, it is gone; put back"):
            run_trial(longer, tmp_path / "run")
        (tmp_path / "elsewhere").rename(tmp_path / "data" / name)
    write(tmp_path / "data", LABELS)  # with other times
    assert run_trial(longer, tmp_path / "run")["fresh_examples"] > 16
    assert "trained with" not in capsys.readouterr().err


@pytest.mark.parametrize("form", DATA)
def test_one_who_means_it_goes_on_and_is_told_once_though_what_is_read_again_has_changed(
    begin: Callable[[str], Config], tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = begin(form)
    DATA[form][0](tmp_path / "data", [9 - label for label in LABELS])  # each of them
    capsys.readouterr()
    assert run_trial(more(config, 24, allowed=True), tmp_path / "run")["fresh_examples"] > 16
    told = [line for line in capsys.readouterr().err.splitlines() if "trained with" in line]
    assert len(told) == {"parquet": 2, "shards": 4}.get(form, len(told)) > 0, "one line for each file"
    # What is here counts from now on.
    assert run_trial(more(config, 32), tmp_path / "run")["fresh_examples"] > 24
    assert "trained with" not in capsys.readouterr().err


def test_one_who_goes_on_is_told_of_other_examples_held_out_and_not_let_on_with_other_classes(
    begin: Callable[[str], Config], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, data = begin("photographs"), tmp_path / "data"
    for file in sorted(data.rglob("*.png"))[:5]:
        file.rename(file.with_name(f"z{file.name}"))  # the rows that are held out are others' now
    run_trial(more(config, 24, allowed=True), tmp_path / "run")
    assert "other examples are held out now than before" in capsys.readouterr().err
    run_trial(more(config, 32), tmp_path / "run")
    assert "other examples" not in capsys.readouterr().err
    (data / "class-0").rename(data / "class-2")
    with pytest.raises(DataError, match="classes have other names than the data that the run was trained on"):
        run_trial(more(config, 40, allowed=True), tmp_path / "run")


def test_a_checkpoint_of_other_data_is_not_set_aside_for_an_older_one(
    begin: Callable[[str], Config], tmp_path: Path
) -> None:
    config = begin("parquet")
    parquet(tmp_path / "data", LABELS[::-1])
    run_trial(more(config, 24, allowed=True), tmp_path / "run")
    assert (tmp_path / "run/checkpoint/previous.pt").exists(), "or this test shows nothing"
    parquet(tmp_path / "data", LABELS)  # what the checkpoint before was trained with
    before = (tmp_path / "run/checkpoint/last.pt").read_bytes()
    refused = r"trained with \S*train-0\.parquet .* by data\.allow_changed=true$"
    with pytest.raises(FolderError, match=refused):
        run_trial(more(config, 32), tmp_path / "run")
    assert (tmp_path / "run/checkpoint/last.pt").read_bytes() == before
    assert not list((tmp_path / "run/checkpoint").glob("*.damaged"))
