"""What is read off runs whose worth is known."""

import math
from pathlib import Path

import numpy as np
import pytest
from scipy import interpolate, stats

from adaecho.records.files import read_json
from adaecho.records.trials import read_rows
from experiments.distance.distance import ARMS, SEEDS, effective, readings

UNIQUE = 1000
REPEATED = ("batch", "buffer_64", "buffer_256", "buffer_1024", "buffer_4096", "pass")
RECORDS = sorted((Path(__file__).parents[2] / "results" / "distance").glob("*/worths.json"))


def rows(uses: dict[str, float]) -> list[dict[str, object]]:
    """Runs whose loss is 2 - ln(D / U) / 3, with D of each arm in U."""
    times = {**uses, **{f"new_{k}": float(k) for k in range(1, 5)}}
    return [
        {"arm": arm, "seed": seed, "learning_rate": 0.1, "loss": 2 - math.log(times[arm]) / 3}
        for seed in SEEDS
        for arm in ARMS
    ]


def test_a_loss_is_that_of_so_many_new_examples() -> None:
    curve = [2 - math.log(k) / 3 for k in range(1, 5)]
    for times in (0.5, 1.0, 1.7, 3.9, 5.0):
        assert effective(2 - math.log(times) / 3, curve, UNIQUE) == pytest.approx(times * UNIQUE)


def test_worth_slope_and_the_least_buffer_are_what_the_runs_were_made_with() -> None:
    uses = dict(zip(REPEATED, (1.0, 1.3, 2.2, 3.7, 3.8, 4.0), strict=True))
    found = readings(rows(uses), UNIQUE)
    worths = {row["arm"]: row["worth"] for row in found if "arm" in row}
    assert worths == pytest.approx({arm: (times - 1) / 3 for arm, times in uses.items()})
    assert [row["verdict"] for row in found if "verdict" in row] == ["holds"]
    assert [row["buffer"] for row in found if "buffer" in row] == [1024]
    falling = dict(zip(REPEATED, (1.0, 3.9, 3.0, 2.0, 1.5, 1.2), strict=True))
    (verdict,) = (row["verdict"] for row in readings(rows(falling), UNIQUE) if "verdict" in row)
    assert verdict == "does not hold"


def test_nothing_is_decided_where_a_run_diverged() -> None:
    broken = rows(dict.fromkeys(REPEATED, 2.0))
    broken[0]["loss"] = math.inf
    assert readings(broken, UNIQUE) == [{"rule": "slope", "verdict": "not decided"}]


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.parent.name)
def test_an_outcome_is_what_its_runs_say(record: Path) -> None:
    """By another road: D where the curve of the new arms crosses a loss, and the slope by its formula."""
    rows, outcome = read_rows(record), read_json(record.with_name("outcome.json"))
    of_arm = {arm: [row["loss"] for row in rows if row["arm"] == arm] for arm in ARMS}
    losses = {arm: np.array(found[-len(SEEDS) :]) for arm, found in of_arm.items()}
    curve = [losses[f"new_{times}"].mean() for times in range(1, 5)]
    logs = interpolate.interp1d(curve, np.log(range(1, 5)), fill_value="extrapolate")
    worths = {arm: (np.exp(logs(of_seeds)) - 1) / 3 for arm, of_seeds in losses.items() if "new" not in arm}
    told = {row["arm"]: row for row in outcome if "arm" in row}
    for arm, worth in worths.items():
        half = stats.t.ppf(0.975, len(worth) - 1) * stats.sem(worth)
        expected = worth.mean(), worth.mean() - half, worth.mean() + half
        assert (told[arm]["worth"], told[arm]["low"], told[arm]["high"]) == pytest.approx(expected)
    at = np.log2([64, 256, 1024, 4096, 8192])
    centred = at - at.mean()
    slopes = centred @ np.array([worths[arm] for arm in list(worths)[1:]]) / (centred @ centred)
    low, high = stats.t.interval(1 - 0.05 / 3, len(slopes) - 1, slopes.mean(), stats.sem(slopes))
    (slope,) = [row for row in outcome if row.get("rule") == "slope"]
    assert (slope["slope"], slope["low"], slope["high"]) == pytest.approx((slopes.mean(), low, high))
    assert slope["verdict"] == ("holds" if low > 0 else "does not hold" if high < 0 else "not decided")
