"""The rules of resnet32_seeds, on differences with known verdicts."""

import json
from pathlib import Path

import pytest

from experiments.resnet32.seeds import MARGIN, add_ends, cost_verdict, crossing, read_ends, table, verdict


@pytest.mark.parametrize(
    ("differences", "margin", "said"),
    [
        ([0.004, 0.005, 0.006], MARGIN, "better"),
        ([-0.001, 0.0, 0.001], MARGIN, "no worse"),
        ([-0.001, 0.0, 0.001], 0.0, "not decided"),
        ([-0.02, -0.021, -0.019], MARGIN, "worse"),
        ([-0.02, 0.0, 0.02], MARGIN, "not decided"),
        ([0.004, 0.005], MARGIN, "not decided"),
    ],
)
def test_the_verdict_follows_the_rule(differences: list[float], margin: float, said: str) -> None:
    assert verdict(differences, margin)[1] == said


def test_the_cost_is_interpolated_between_two_evaluations() -> None:
    assert crossing([(100, 0.90), (200, 0.92), (300, 0.90), (400, 0.93)]) == pytest.approx(150)
    assert crossing([(100, 0.90), (200, 0.905)]) is None


@pytest.mark.parametrize(
    ("pairs", "shown", "said"),
    [
        ([(50, 100), (51, 100), (52, 100)], "0.51 (0.49 to 0.54)", "fewer"),
        ([(200, 100), (201, 100), (199, 100)], "2.00 (1.98 to 2.02)", "more"),
        ([(50, 100), (200, 100), (100, 100)], "1.00 (0.18 to 5.59)", "not decided"),
        ([(50, 100), (51, 100), (None, 100)], "-", "not decided"),
        ([(50, 100), (51, 100), (52, None)], "-", "not decided"),
        ([(100, 100)] * 3, "-", "not decided"),
    ],
)
def test_costs_are_decided_if_all_runs_reach_the_target(
    pairs: list[tuple[float, float]], shown: str, said: str
) -> None:
    assert cost_verdict(pairs) == (shown, said)


def test_only_finished_runs_are_read_and_added(tmp_path: Path) -> None:
    ended = {
        "baseline": ("budget_spent", 0.9),
        "example_before_e2": ("diverged", None),
        "other": ("running", None),
    }
    for arm, (status, accuracy) in ended.items():
        folder = tmp_path / arm / "0" / "0"
        folder.mkdir(parents=True)
        summary = {"status": status, "seed": 3, "steps": 5, "fresh_examples": 640}
        summary |= {"final": {"accuracy": 0.8}, "test": {"accuracy": accuracy}} if accuracy else {}
        (folder / "summary.json").write_text(json.dumps(summary))
        environment = {"git": {"sha": "0123456789"}, "processor": "one"}
        (folder / "environment.json").write_text(json.dumps(environment))
        (folder / "metrics.jsonl").write_text('{"fresh_examples": 640, "accuracy": 0.8}\n')
    rows = read_ends(tmp_path)
    assert [(row["arm"], row["test"], row["held_out"]) for row in rows] == [
        ("baseline", 0.9, 0.8), ("example_before_e2", 0.1, None),
    ]  # fmt: skip
    assert "| baseline | 0.9000 |" in table(rows)
    (tmp_path / "design.json").write_text('{"experiment": "resnet32_rates"}')
    for _ in range(2):
        ends = add_ends(tmp_path, tmp_path / "results")
        assert ends == tmp_path / "results" / "resnet32_rates" / "cifar10" / "ends.json"
        assert json.loads(ends.read_text()) == rows
