"""Headroom: the arithmetic by hand, and the command on digits."""

import sys

import pytest

from adaecho import headroom
from adaecho.headroom import Headroom


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
    assert "echo.factor=4" in advice


def test_the_command_measures_digits(capsys: pytest.CaptureFixture[str]) -> None:
    headroom.main(["task=digits", "device=cpu"], budget_s=0.01)
    out = capsys.readouterr().out
    for name in ("read alone", "augment alone", "upstream as it runs", "training step", "R = ", "at e = 4"):
        assert name in out


def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["headroom", "task=digits", "echo.factor=0.5"])
    with pytest.raises(SystemExit):
        headroom.cli()
    assert "echo.factor=0.5" in capsys.readouterr().err
