"""Worths, slopes and buffers of runs with known worths."""

import math
from pathlib import Path

import numpy as np
import pytest
from scipy import interpolate, stats

from adaecho.records.files import read_json
from adaecho.records.trials import read_rows
from experiments.distance.distance import ARMS, SEEDS, readings

UNIQUE = 1000
REPEATED = ("batch", "buffer_64", "buffer_256", "buffer_1024", "buffer_4096", "pass")
RECORDS = sorted((Path(__file__).parents[2] / "results" / "distance").glob("*/worths.json"))


def rows(uses: dict[str, float]) -> list[dict[str, object]]:
    """Runs with a loss of 2 - ln(D / U) / 3, with D of each arm in units of U."""
    times = {**uses, **{f"new_{k}": float(k) for k in range(1, 5)}}
    return [
        {"arm": arm, "seed": seed, "learning_rate": 0.1, "loss": 2 - math.log(times[arm]) / 3}
        for seed in SEEDS
        for arm in ARMS
    ]


def test_worths_slope_and_smallest_buffer_are_recovered_from_synthetic_runs() -> None:
    uses = dict(zip(REPEATED, (1.0, 1.3, 2.2, 3.7, 3.8, 4.0), strict=True))
    found = readings(rows(uses), UNIQUE)
    worths = {row["arm"]: row["worth"] for row in found if "arm" in row}
    assert worths == pytest.approx({arm: (times - 1) / 3 for arm, times in uses.items()})
    assert [row["verdict"] for row in found if "verdict" in row] == ["holds"]
    assert [row["buffer"] for row in found if "buffer" in row] == [1024]


def test_a_diverged_run_leaves_the_slope_undecided() -> None:
    broken = rows(dict.fromkeys(REPEATED, 2.0))
    broken[0]["loss"] = math.inf
    assert readings(broken, UNIQUE) == [{"rule": "slope", "verdict": "not decided"}]


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.parent.name)
def test_a_recorded_outcome_equals_an_independent_recomputation(record: Path) -> None:
    """D is where the curve of the new arms crosses a loss; the slope follows its formula."""
    rows, outcome = read_rows(record), read_json(record.with_name("outcome.json"))
    of_arm = {arm: [row["loss"] for row in rows if row["arm"] == arm] for arm in ARMS}
    losses = {arm: np.array(found[-len(SEEDS) :]) for arm, found in of_arm.items()}
    curve = [losses[f"new_{times}"].mean() for times in range(1, 5)]
    logs = interpolate.interp1d(curve, np.log(range(1, 5)), fill_value="extrapolate")
    worths = {arm: (np.exp(logs(of_seeds)) - 1) / 3 for arm, of_seeds in losses.items() if "new" not in arm}
    by_arm = {row["arm"]: row for row in outcome if "arm" in row}
    for arm, worth in worths.items():
        half = stats.t.ppf(0.975, len(worth) - 1) * stats.sem(worth)
        expected = worth.mean(), worth.mean() - half, worth.mean() + half
        assert (by_arm[arm]["worth"], by_arm[arm]["low"], by_arm[arm]["high"]) == pytest.approx(expected)
    at = np.log2([64, 256, 1024, 4096, 8192])
    centered = at - at.mean()
    slopes = centered @ np.array([worths[arm] for arm in list(worths)[1:]]) / (centered @ centered)
    low, high = stats.t.interval(1 - 0.05 / 3, len(slopes) - 1, slopes.mean(), stats.sem(slopes))
    (slope,) = [row for row in outcome if row.get("rule") == "slope"]
    assert (slope["slope"], slope["low"], slope["high"]) == pytest.approx((slopes.mean(), low, high))
    assert slope["verdict"] == ("holds" if low > 0 else "does not hold" if high < 0 else "not decided")
