"""Worths at equal steps: the recorded outcome, and the interval by root finding."""

import json
import math
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import pytest
from scipy import optimize, stats

from adaecho.records.trials import read_rows
from experiments.repeat_value.equal_steps import FAILS, HOLDS, OPEN, decide, ratio_of_means, readings

ROOT = Path(__file__).resolve().parents[2]
RECORDS = sorted((ROOT / "results" / "equal_steps").glob("*/worths.json"))


def fieller(above: list[float], below: list[float], level: float) -> tuple[float, float, float]:
    """The ratio, and the r at which Student's test of mean(above - r below) changes, by root finding."""

    def excess(r: float) -> float:
        ours = [a - r * b for a, b in zip(above, below, strict=True)]
        t = fmean(ours) / (stdev(ours) / math.sqrt(len(ours)))
        return t * t - float(stats.t.ppf(1 - level / 2, len(ours) - 1)) ** 2

    ratio = fmean(above) / fmean(below)
    ends = []
    for side in (-1, 1):
        far = 0.01
        while excess(ratio + side * far) < 0:
            far *= 1.5
        ends.append(optimize.brentq(excess, ratio, ratio + side * far))
    return ratio, ends[0], ends[1]


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.parent.name)
def test_the_recorded_outcome_follows_from_the_branches(record: Path) -> None:
    rows = read_rows(record)
    assert sorted({row["seed"] for row in rows}) == list(range(5000, 5024))
    recorded = json.loads(record.with_name("outcome.json").read_text())
    found = readings(rows)
    for row, again in zip(recorded[: len(found)], found, strict=True):
        near = {key: pytest.approx(value) for key, value in row.items() if isinstance(value, float)}
        assert again == {**row, **near}
    assert all("reading" in row for row in recorded[len(found) :]), (
        "correlations with the noise, see the page"
    )


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.parent.name)
def test_the_page_has_the_correlations_with_noise(record: Path) -> None:
    page = (ROOT / "experiments" / "repeat_value" / "README.md").read_text()
    for row in json.loads(record.with_name("outcome.json").read_text()):
        if "reading" in row:
            between = f"{row['low']:.2f} to {row['high']:.2f}" if "low" in row else f"p = {row['p']:.2g}"
            assert f"{row['correlation']:.2f} ({between})" in page


def test_fiellers_interval_has_the_ends_of_students_test() -> None:
    rng = np.random.default_rng(3)
    below = rng.normal(1.0, 0.4, 24)
    above = 0.8 * below + rng.normal(0.0, 0.2, 24)
    found = ratio_of_means(above, below, 0.05)
    assert found == pytest.approx(fieller(list(above), list(below), 0.05))
    assert ratio_of_means(above, rng.normal(0.0, 1.0, 24), 0.05) is None  # the lower mean is not above 0
    assert ratio_of_means(np.append(above, np.inf), np.append(below, 1.0), 0.05) is None


def test_a_verdict_needs_the_whole_interval() -> None:
    ends = ((0.96, 1.0), (0.5, 0.6), (0.4, 1.4))
    found = [ratio_of_means(np.linspace(*one, 8), 1 + np.linspace(0, 0.01, 8), 0.05) for one in ends]
    assert [decide(one) for one in (*found, None)] == [HOLDS, FAILS, OPEN, OPEN]
