"""Headroom: the arithmetic by hand, and the command on digits and on photographs."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from adaecho.errors import ConfigError, DataError
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["task=digits", "step_s=0"], "step_s=0: must be the seconds"),
        (["images=.", "step_s=soon"], "step_s=soon"),
        (["images=.", "task=digits"], "task=digits: with images= there are only"),
        (["images=.", "batch_size=0"], "batch_size=0: must be a whole number, at least 1"),
        (["images=.", "device=gpu"], "device=gpu: must be one of"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        headroom.main(arguments)


def test_where_no_images_are(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file or folder"):
        headroom.main([f"images={tmp_path / 'nowhere'}"])
    with pytest.raises(DataError, match="neither images"):
        headroom.main([f"images={tmp_path}"])
    parquet.write_table(pyarrow.table({"text": ["a"]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="needs a column 'image', and has text"):
        headroom.main([f"images={tmp_path}"])
    (tmp_path / "b.parquet").write_bytes(b"PAR1")
    (tmp_path / "a.parquet").unlink()
    with pytest.raises(DataError, match="not readable as parquet"):
        headroom.main([f"images={tmp_path}"])


def test_a_damaged_photograph_is_named_or_skipped(tmp_path: Path, measured: Measured) -> None:
    photographs(tmp_path)
    damaged = tmp_path / "class" / "3.jpg"
    damaged.write_bytes(damaged.read_bytes()[:-300])
    arguments = [f"images={tmp_path}", "step_s=1", "batch_size=4", "size=8"]
    with pytest.raises(DataError, match=r"corrupt or truncated.*3\.jpg.*max_bad_examples"):
        measured(*arguments)
    assert "decode alone" in measured(*arguments, "max_bad_examples=1000000")


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        (["task=digits", "echo.factor=0.5"], "echo.factor=0.5"),
        (["image=photographs"], "Did you mean images"),
        (["~task"], "task.name has no value"),
    ],
)
def test_a_mistake_gets_one_message(command: Command, arguments: list[str], needed: str) -> None:
    code, _, said = command("adaecho.headroom", *arguments)
    assert code != 0
    assert needed in said
    assert "To append" not in said


def test_help_says_what_to_type(command: Command) -> None:
    assert "images=" in command("adaecho.headroom", "--help")[1]
