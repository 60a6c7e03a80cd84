"""Headroom: the arithmetic by hand, and the command on digits and on photographs."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from adaecho.errors import DataError
from adaecho.headroom import __main__ as headroom
from adaecho.headroom.measure import Headroom
from tests.conftest import Command


def found(upstream_s: float, step_s: float) -> Headroom:
    return Headroom({"read": 0.1, "decode": 0.7, "augment": 0.2}, upstream_s, step_s)


def test_gains_follow_equation_1() -> None:
    assert found(6.0, 1.0).ratio == 6
    for times, factors, gains in (
        ((6.0, 1.0), (1, 2, 4, 6, 12), (1, 2, 4, 6, 6)),
        ((1.0, 2.0), (1, 2, 4), (1, 1, 1)),
        ((3.0, 2.0), (2,), (1.5,)),
    ):
        assert [found(*times).gain(factor) for factor in factors] == pytest.approx(list(gains))


def test_advice() -> None:
    assert found(1.0, 2.0).advice() == "Your input pipeline is not the bottleneck: echoing would not help."
    assert "more workers" in found(1.2, 1.0).advice()
    assert "a factor up to 2.6 costs no time" in (more_than_half := found(2.6, 1.0).advice())
    assert "echo.factor=2," in more_than_half
    advice = found(6.0, 1.0).advice()
    for text in ("R = 6.0", "slowest stage 'decode'", "echo=example_before_augmentation echo.factor=4"):
        assert text in advice
    slow_augment = Headroom({"read": 0.1, "decode": 0.2, "augment": 0.7}, 6.0, 1.0)
    assert "echo=example_after_augmentation" in slow_augment.advice()


Measured = Callable[..., str]


@pytest.fixture
def measured(capsys: pytest.CaptureFixture[str]) -> Measured:
    """What the command says, which takes little time over it."""

    def said(*arguments: str) -> str:
        headroom.main(list(arguments), budget_s=0.01)
        return capsys.readouterr().out

    return said


def test_the_command_measures_digits(measured: Measured) -> None:
    out = measured("task=digits", "device=cpu")
    for name in ("read alone", "augment alone", "upstream as it runs", "training step", "R = "):
        assert name in out
    assert "2500.00" in measured("task=digits", "step_s=2.5", "device=cpu"), (
        "a stated step in place of its own"
    )


def photographs(folder: Path, number: int = 12) -> None:
    for row in range(number):
        noise = np.random.default_rng(row).integers(0, 256, (30 + row, 40, 3), dtype=np.uint8)
        (folder / "class").mkdir(exist_ok=True)
        Image.fromarray(noise).save(folder / "class" / f"{row}.jpg")


def as_parquet(folder: Path) -> Path:
    rows = [{"bytes": path.read_bytes(), "path": None} for path in sorted(folder.rglob("*.jpg"))]
    file = folder / "train.parquet"
    parquet.write_table(pyarrow.table({"image": rows, "label": list(range(len(rows)))}), file)
    return file


@pytest.mark.parametrize("form", ["folder", "file", "parquet"])
def test_the_command_measures_photographs(form: str, tmp_path: Path, measured: Measured) -> None:
    photographs(tmp_path)
    path = {"folder": tmp_path, "file": tmp_path / "class" / "0.jpg"}.get(form) or as_parquet(tmp_path)
    arguments = [f"images={path}", "step_s=1e-9", "batch_size=4", "num_workers=1", "size=8"]
    out = measured(*arguments)
    assert f"{path}, batches of 4, num_workers=1" in out
    for name in ("read alone", "decode alone", "augment alone", "upstream as it runs", "at e = R"):
        assert name in out
    assert "Your accelerator waits for data" in out
    out = measured(*arguments, "step_s=1e9")
    assert out.endswith("Your input pipeline is not the bottleneck: echoing would not help.\n")
    assert "at e = R" not in out


def test_without_a_stated_step_resnet_50_is_timed(tmp_path: Path, measured: Measured) -> None:
    photographs(tmp_path)
    settings = ("batch_size=2", "num_workers=0", "size=32", "device=cpu")
    assert "training step" in measured(f"images={tmp_path}", *settings)


def test_a_damaged_photograph_is_named_or_skipped(tmp_path: Path, measured: Measured) -> None:
    photographs(tmp_path)
    damaged = tmp_path / "class" / "3.jpg"
    damaged.write_bytes(damaged.read_bytes()[:-300])
    arguments = [f"images={tmp_path}", "step_s=1", "batch_size=4", "size=8"]
    with pytest.raises(DataError, match=r"corrupt or truncated.*3\.jpg.*max_bad_examples"):
        measured(*arguments)
    assert "decode alone" in measured(*arguments, "max_bad_examples=1000000")


def _without_images(folder: Path) -> None:
    parquet.write_table(pyarrow.table({"text": ["a"]}), folder / "a.parquet")


def _without_table(folder: Path) -> None:
    (folder / "a.parquet").write_bytes(b"PAR1")


REFUSED: dict[str, tuple[str, Callable[[Path], object]]] = {
    "step_s=0: must be the seconds": ("task=digits step_s=0", Path.exists),
    "step_s=soon": ("images=. step_s=soon", Path.exists),
    "task=digits: with images= there are only": ("images=. task=digits", Path.exists),
    "batch_size=0: must be a whole number, at least 1": ("images=. batch_size=0", Path.exists),
    "device=gpu: must be one of": ("images=. device=gpu", Path.exists),
    "echo.factor=0.5": ("task=digits echo.factor=0.5", Path.exists),
    "Did you mean images": ("image=photographs", Path.exists),
    "task.name has no value": ("~task", Path.exists),
    "no such file or folder": ("images=nowhere", Path.exists),
    "neither images": ("images=.", Path.exists),
    "needs a column 'image', and has text": ("images=.", _without_images),
    "not readable as parquet": ("images=.", _without_table),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_can_not_be_gets_one_message(command: Command, tmp_path: Path, message: str) -> None:
    typed, write = REFUSED[message]
    write(tmp_path)
    code, _, said = command("adaecho.headroom", *typed.split())
    assert code == 2
    assert message in said
    assert "Traceback" not in said
    assert "To append" not in said


def test_help_says_what_to_type(command: Command) -> None:
    assert "images=" in command("adaecho.headroom", "--help")[1]
