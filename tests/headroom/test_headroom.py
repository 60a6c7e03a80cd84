"""Headroom: the arithmetic by hand, and the command on digits and on photographs."""

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
    starving = found(6.0, 1.0)
    assert starving.ratio == 6
    assert [starving.gain(factor) for factor in (1, 2, 4, 6, 12)] == [1, 2, 4, 6, 6]
    busy = found(1.0, 2.0)
    assert [busy.gain(factor) for factor in (1, 2, 4)] == [1, 1, 1]
    between = found(3.0, 2.0)
    assert between.gain(2) == pytest.approx(1.5)


def test_advice() -> None:
    assert found(1.0, 2.0).advice() == "Your input pipeline is not the bottleneck: echoing would not help."
    assert "more workers" in found(1.2, 1.0).advice()
    advice = found(6.0, 1.0).advice()
    assert "R = 6.0" in advice
    assert "slowest stage 'decode'" in advice
    assert "echo=example_before_augmentation echo.factor=4" in advice
    slow_augment = Headroom({"read": 0.1, "decode": 0.2, "augment": 0.7}, 6.0, 1.0)
    assert "echo=example_after_augmentation" in slow_augment.advice()


def test_the_command_measures_digits(capsys: pytest.CaptureFixture[str]) -> None:
    headroom.main(["task=digits", "device=cpu"], budget_s=0.01)
    out = capsys.readouterr().out
    for name in ("read alone", "augment alone", "upstream as it runs", "training step", "R = "):
        assert name in out


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


@pytest.mark.parametrize("form", ["folder", "parquet"])
def test_the_command_measures_photographs(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    photographs(tmp_path)
    path = tmp_path if form == "folder" else as_parquet(tmp_path)
    arguments = [f"images={path}", "step_s=1e-9", "batch_size=4", "num_workers=1", "size=8"]
    headroom.main(arguments, budget_s=0.01)
    out = capsys.readouterr().out
    assert f"{path}, batches of 4, num_workers=1" in out
    for name in ("read alone", "decode alone", "augment alone", "upstream as it runs", "at e = R"):
        assert name in out
    assert "Your accelerator waits for data" in out
    headroom.main([*arguments, "step_s=1e9"], budget_s=0.01)
    out = capsys.readouterr().out
    assert out.endswith("Your input pipeline is not the bottleneck: echoing would not help.\n")
    assert "at e = R" not in out


def test_without_a_stated_step_resnet_50_is_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photographs(tmp_path)
    arguments = [f"images={tmp_path}", "batch_size=2", "num_workers=0", "size=32", "device=cpu"]
    headroom.main(arguments, budget_s=0.01)
    assert "training step" in capsys.readouterr().out


def test_a_stated_step_replaces_a_tasks_own(capsys: pytest.CaptureFixture[str]) -> None:
    headroom.main(["task=digits", "step_s=2.5", "device=cpu"], budget_s=0.01)
    assert "2500.00" in capsys.readouterr().out


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


def test_a_damaged_photograph_is_named_or_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photographs(tmp_path)
    damaged = tmp_path / "class" / "3.jpg"
    damaged.write_bytes(damaged.read_bytes()[:-300])
    arguments = [f"images={tmp_path}", "step_s=1", "batch_size=4", "size=8"]
    with pytest.raises(DataError, match=r"corrupt or truncated.*3\.jpg.*max_bad_examples"):
        headroom.main(arguments, budget_s=0.01)
    headroom.main([*arguments, "max_bad_examples=1000000"], budget_s=0.01)
    assert "decode alone" in capsys.readouterr().out


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


def test_one_photograph_can_be_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photographs(tmp_path)
    one = next(tmp_path.rglob("*.jpg"))
    headroom.main([f"images={one}", "step_s=1", "size=8"], budget_s=0.01)
    assert "decode alone" in capsys.readouterr().out
