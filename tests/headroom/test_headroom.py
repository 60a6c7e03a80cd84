"""Headroom: the arithmetic, and the command on digits."""

from collections.abc import Callable

import pytest

from adaecho.headroom import __main__ as headroom
from adaecho.headroom.pipeline_timer import Headroom
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


def report_of(measured: Headroom, num_workers: int = 1) -> str:
    return "\n".join(measured.report("digits", 32, num_workers))


def test_the_report_of_a_task() -> None:
    assert report_of(found(1.0, 2.0)).endswith("is not the bottleneck, so echoing would not help.")
    for text in (
        "R = t_upstream / t_downstream = 6.00", "e = R: at best 6.00 times", "1. use more workers (now 1, ",
        "EchoLoader(..., factor=4): a factor up to 6.0 costs no time",
        "slowest stage: decode; start with echo=example_before_augmentation echo.factor=4",
    ):  # fmt: skip
        assert text in report_of(found(6.0, 1.0))
    assert "echo.factor=2" in report_of(found(2.4, 1.0))
    slow_augment = Headroom({"read": 0.1, "decode": 0.2, "augment": 0.7}, 6.0, 1.0)
    assert "echo=example_after_augmentation" in report_of(slow_augment)


Measured = Callable[..., str]


@pytest.fixture
def measured(capsys: pytest.CaptureFixture[str]) -> Measured:
    """Output of the command with short measurements."""

    def said(*arguments: str) -> str:
        headroom.main(list(arguments), budget_s=0.01)
        return capsys.readouterr().out

    return said


def test_the_command_measures_digits(measured: Measured) -> None:
    out = measured("task=digits", "device=cpu")
    for name in ("read alone", "augment alone", "upstream as it runs", "training step", "R = "):
        assert name in out
    assert "2500.00" in measured("task=digits", "step_s=2.5", "device=cpu")


REFUSED = {
    "step_s=0: expected the seconds": "task=digits step_s=0",
    "step_s=soon: expected": "task=digits step_s=soon",
    "echo.factor=0.5": "task=digits echo.factor=0.5",
    "task: missing; set one, for example task=digits": "batch_size=16",
}


@pytest.mark.parametrize("message", REFUSED)
def test_mistakes_get_one_message(command: Command, message: str) -> None:
    code, _, said = command("adaecho.headroom", *REFUSED[message].split())
    assert code == 2
    assert message in said
    assert "Traceback" not in said


def test_help_shows_the_arguments(command: Command) -> None:
    assert "step_s=" in command("adaecho.headroom", "--help")[1]
