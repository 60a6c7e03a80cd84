"""Costs of arms as means, ratios and intervals, by hand and against the formulas."""

import math
import random
from itertools import count, groupby

import numpy as np
import pytest
from scipy import stats

from adaecho.records.outcome import best_trials, ends, outcome, ratio_words, without_target
from adaecho.records.statistics import Ratio, cost_ratio

_repeats = count()


def trial(arm, repeat, index, cost, *, factor=1, variant="none", time_s=1.0, **more):
    """The row of a trial that reached its target after ``cost`` fresh examples, or missed it (None)."""
    return {
        "task": "digits", "arm": arm, "echo_variant": variant, "echo_factor": factor,
        "repeat": repeat, "index": index,
        "status": "budget_spent" if cost is None else "reached", "counted": True,
        "target_metric": "accuracy", "target_value": 0.97, "fresh_examples": cost or 5000,
        "to_target_fresh_examples": cost, "to_target_steps": None if cost is None else cost // 32 * factor,
        "to_target_train_time_s": None if cost is None else time_s, **more,
    }  # fmt: skip


def searches(arm, *costs, **more):
    """Searches of one trial each."""
    return [trial(arm, repeat, 0, cost, **more) for repeat, cost in enumerate(costs)]


def test_two_arms_by_hand():
    rows = [
        trial("baseline", 0, 0, 6400, time_s=2.0),
        trial("baseline", 0, 1, 3200, time_s=4.0),
        trial("baseline", 1, 0, None),
        trial("baseline", 1, 1, 9600, time_s=6.0),
        *searches("batch_e2", 1600, 4800, factor=2, variant="batch"),
    ]
    baseline, batch = outcome(rows)
    half = 12.706204736  # Student's t with one degree of freedom; costs are one unit from the mean
    for cost, unit in (("fresh_examples", 3200), ("steps", 100), ("train_time_s", 1)):
        interval, mean = (baseline[cost].pop("low"), baseline[cost].pop("high")), baseline[cost]["mean"]
        assert interval == pytest.approx((mean - half * unit, mean + half * unit))
    assert baseline == {
        "arm": "baseline", "echo_variant": "none", "echo_factor": 1, "searches": 2, "reached": 2, "trials": 4,
        "diverged": 0, "missed": 1, "failed": 0, "baseline": "baseline", "ratio_to_baseline": 1.0,
        "ratio_low": None, "ratio_high": None,
        "fresh_examples": {"mean": 6400, "min": 3200, "max": 9600},
        "steps": {"mean": 200, "min": 100, "max": 300},
        "train_time_s": {"mean": 5.0, "min": 4.0, "max": 6.0},
    }  # fmt: skip
    for cost, numbers in {"fresh_examples": (3200, 1600, 4800), "steps": (200, 100, 300)}.items():
        assert tuple(batch[cost][key] for key in ("mean", "min", "max")) == numbers
    # The ratio of geometric means is the root of (1600 * 4800) / (3200 * 9600).
    assert batch["ratio_to_baseline"] == pytest.approx(0.5)
    assert batch["ratio_low"] < 0.5 < batch["ratio_high"]


def test_the_best_trial_has_the_fewest_fresh_examples_then_the_lowest_index():
    times = ((2, 320, 9.0), (1, 320, 5.0), (0, 640, 1.0))
    rows = [trial("a", 0, index, cost, time_s=time_s) for index, cost, time_s in times]
    for order in (rows, rows[::-1]):
        assert best_trials(order)["a", 0]["index"] == 1
        assert outcome(order)[0]["train_time_s"] == {"mean": 5.0, "min": 5.0, "max": 5.0}


def test_a_ratio_needs_an_arm_and_a_baseline_that_reached():
    assert outcome([]) == []
    arm = outcome(searches("baseline", 320) + searches("b", None, factor=4, variant="batch"))[1]
    assert arm["fresh_examples"] is arm["steps"] is arm["train_time_s"] is arm["ratio_to_baseline"] is None
    assert arm["reached"] == 0
    arms = outcome(searches("baseline", None) + searches("b", 160, variant="batch"))
    assert [arm["ratio_to_baseline"] for arm in arms] == [None, None]


@pytest.mark.parametrize(
    ("ours", "theirs", "ratio", "bound", "words"),
    [
        ((320, 640), (320, None), (640 / 5000) ** 0.5, "at most", "<0.36"),
        ((320, None), (320, 640), (5000 / 640) ** 0.5, "at least", ">2.80"),
        ((320, None), (320, None), None, None, None),
        ((320, 640), (320, 640), 1.0, None, "1.00"),
    ],
    ids=["the baseline", "the arm", "both", "none"],
)
def test_a_search_that_missed_costs_at_least_what_it_read(ours, theirs, ratio, bound, words):
    """A miss after 5,000 fresh examples bounds the ratio of geometric means."""
    arm = outcome(searches("baseline", *theirs) + searches("b", *ours, factor=2, variant="batch"))[1]
    assert arm["ratio_to_baseline"] == (ratio and pytest.approx(ratio))
    assert (arm.get("ratio_bound"), ratio and ratio_words(arm)) == (bound, words)
    assert (arm["ratio_low"] is None) == (words != "1.00")


def test_diverged_failed_and_surplus_trials_do_not_count():
    rows = [
        trial("a", 0, 0, None, status="diverged", counted=False),
        trial("a", 0, 1, 640),
        trial("a", 0, 2, None, status="failed", counted=False),
        trial("a", 0, 3, 160, counted=False),  # exceeds the budget of the search
        trial("a", 0, 4, None, status="running", counted=False),
    ]
    (arm,) = outcome(rows)
    assert (arm["trials"], arm["diverged"], arm["failed"], arm["missed"]) == (1, 1, 1, 0)
    assert arm["fresh_examples"]["mean"] == 640


@pytest.mark.parametrize(
    ("other", "variant", "ratios"),
    [
        pytest.param("batch_e2", "batch", [1.0, 2.0], id="the only arm without echoing"),
        pytest.param("baseline", "none", [0.5, 1.0], id="the arm named baseline"),
        pytest.param("other", "none", [None, None], id="two arms without echoing"),
    ],
)
def test_which_arm_is_the_baseline(other, variant, ratios):
    arms = outcome(searches("plain", 320) + searches(other, 640, variant=variant))
    assert [arm["ratio_to_baseline"] for arm in arms] == [one and pytest.approx(one) for one in ratios]


def test_costs_to_other_targets_are_not_compared():
    rows = searches("baseline", 320) + searches("b", 640, factor=4, variant="batch")
    assert outcome(rows)[1]["ratio_to_baseline"] == 2
    for changed in (
        {"target_value": 0.5},
        {"target_in_a_row": 2},
        {"task": "another"},
        {"target_value": 0.5, "baseline": "baseline"},
    ):
        other = outcome([row if row["arm"] == "baseline" else row | changed for row in rows])[1]
        assert other["baseline"] is other["ratio_to_baseline"] is None


@pytest.mark.parametrize("positions", [{}, {"batch_size": 0.5}], ids=["by values", "by axes"])
def test_a_searched_batch_size_does_not_choose_the_baseline(positions):
    """Values of two searches may be equal by chance."""
    sizes = {"conv": (30, 34), "mlp": (33, 31), "conv_batch": (33, 30), "mlp_batch": (31, 34)}
    rows = [
        trial(arm, 0, index, 640, variant="batch" if "batch" in arm else "none", batch_size=size,
              **({"positions": positions} if positions else {}))
        for arm, draws in sizes.items() for index, size in enumerate(draws[: 1 if positions else 2])
    ]  # fmt: skip
    arms = outcome(rows)
    assert not any("batch_size" in arm for arm in arms)
    assert [arm["baseline"] for arm in arms] == [None] * 4
    assert [arm["ratio_to_baseline"] for arm in arms] == [None] * 4


def test_nothing_bounds_a_search_with_trials_left():
    rows = searches("baseline", 320, 320) + searches("b", 640, None, factor=4, variant="batch")
    assert outcome(rows)[1]["ratio_bound"] == "at least"
    rows[-1]["trials_left"] = 2
    other = outcome(rows)[1]
    assert other["ratio_to_baseline"] is None
    assert "ratio_bound" not in other


def test_the_baseline_has_the_settings_of_the_arm():
    rows = [
        *searches("plain32", 320, batch_size=32),
        *searches("plain128", 640, batch_size=128),
        *searches("e2_32", 240, variant="batch", factor=2, batch_size=32),
        *searches("e2_128", 320, variant="batch", factor=2, batch_size=128),
        *searches("e2_64", 320, variant="batch", factor=2, batch_size=64),
    ]
    found = {arm["arm"]: (arm["baseline"], arm["ratio_to_baseline"]) for arm in outcome(rows)}
    assert found == {
        "plain32": ("plain32", 1), "e2_32": ("plain32", pytest.approx(0.75)),
        "plain128": ("plain128", 1), "e2_128": ("plain128", pytest.approx(0.5)), "e2_64": (None, None),
    }  # fmt: skip
    rows[-1]["baseline"] = "plain128"
    assert outcome(rows)[-1]["ratio_to_baseline"] == pytest.approx(0.5)


def test_against_a_slow_version_on_random_rows():
    draw = random.Random(5)
    rows = [
        trial(arm, repeat, index, draw.choice([None, 160, 320, 480]), counted=draw.random() < 0.8)
        for arm in ("x", "y", "z")
        for repeat in range(5)
        for index in range(6)
    ]
    shuffled = draw.sample(rows, len(rows))
    found = {arm["arm"]: arm["fresh_examples"] for arm in outcome(shuffled)}
    for name, group in groupby(rows, key=lambda row: row["arm"]):
        costs = []
        for _, search in groupby(group, key=lambda row: row["repeat"]):
            reached = [r["to_target_fresh_examples"] for r in search if r["counted"]]
            costs += sorted(cost for cost in reached if cost is not None)[:1]
        extremes = {"mean": sum(costs) / len(costs), "min": min(costs), "max": max(costs)}
        assert {key: found[name][key] for key in extremes} == extremes


def run(arm, final, *, steps=100, **more):
    """The row of a run without a target and with a final loss of ``final``."""
    return {
        "arm": arm, "repeat": next(_repeats), "index": 0, "echo_variant": "none", "echo_factor": 1,
        "status": "budget_spent", "target_metric": "cross_entropy", "target_value": None, "steps": steps,
        "fresh_examples": 32 * steps, "trained_examples": 32 * steps, "final_cross_entropy": final,
        "best_value": final / 2, **more,
    }  # fmt: skip


def test_two_arms_without_a_target_by_hand():
    rows = [
        run("plain", 0.2),
        run("gain", 0.3, steps=50, gain=1.8, scale_invariant_steps=100.0),
        run("plain", 0.4, steps=200),
        run("gain", 0.1, steps=80, gain=1.2, scale_invariant_steps=100.0),
    ]
    plain, gain = ends(rows)
    assert (plain["arm"], plain["runs"], plain["diverged"], plain["failed"]) == ("plain", 2, 0, 0)
    assert plain["steps"] == {"mean": 150, "min": 100, "max": 200}
    assert plain["final_cross_entropy"]["max"] == 0.4
    assert plain["best_value"]["min"] == 0.1
    assert plain["mean_gain"] is plain["gain"] is None
    assert gain["mean_gain"] == {"mean": (2 + 1.25) / 2, "min": 1.25, "max": 2.0}
    assert gain["trained_examples"] == {"mean": 32 * 65, "min": 1600, "max": 2560}


def test_runs_without_an_end_are_counted_but_not_averaged():
    first, second = run("a", 0.2), run("a", 9.0, status="diverged")
    del second["final_cross_entropy"]
    for rows in ([first, second], [second, first]):
        (arm,) = ends([*rows, run("a", 9.0, status="failed")])
        assert (arm["runs"], arm["diverged"], arm["failed"]) == (1, 1, 1)
        assert arm["final_cross_entropy"] == {"mean": 0.2, "min": 0.2, "max": 0.2}
    (arm,) = ends([second])
    assert (arm["runs"], arm["steps"]) == (0, None)
    assert without_target([first, second])
    assert not without_target([first, second | {"target_value": 0.9}]), "one row has a target"


def test_the_best_trial_represents_a_search_in_both_directions():
    trials = [
        run("a", 0.5, repeat=0, index=0, best_value=0.5),
        run("a", 0.3, repeat=0, index=1, best_value=0.3, steps=7),
        run("a", 0.4, repeat=1, index=0, best_value=0.4),
        run("a", 0.9, repeat=1, index=1, best_value=0.9, status="diverged"),
    ]
    (less,) = ends(trials)
    assert less["searched"]
    assert less["best_value"] == {"mean": 0.35, "min": 0.3, "max": 0.4}
    assert less["steps"]["min"] == 7
    (more,) = ends([{**trial, "target_metric": "accuracy"} for trial in trials])
    assert more["best_value"] == {"mean": 0.45, "min": 0.4, "max": 0.5}


def test_a_row_has_the_direction_if_the_name_of_the_metric_does_not_tell():
    rows = [run("a", 1.0, repeat=0, index=i, best_value=value) for i, value in enumerate((0.8, 0.1, 0.4))]
    rows = [{**row, "target_metric": "error_rate", "target_direction": "min"} for row in rows]
    assert [row["best_value"] for row in best_trials(rows).values()] == [0.1]


def test_the_interval_of_a_ratio_is_welchs_of_the_log_costs():
    ours, theirs = [900.0, 1100.0, 1000.0, 700.0], [2000.0, 1500.0, 1800.0]
    a, b = np.log(ours), np.log(theirs)
    parts = a.var(ddof=1) / len(a), b.var(ddof=1) / len(b)
    freedom = sum(parts) ** 2 / (parts[0] ** 2 / (len(a) - 1) + parts[1] ** 2 / (len(b) - 1))
    difference, half = a.mean() - b.mean(), stats.t.ppf(0.975, freedom) * math.sqrt(sum(parts))
    expected = [math.exp(difference + by) for by in (0, -half, half)]
    found = cost_ratio(ours, theirs)
    assert [found.value, found.low, found.high] == pytest.approx(expected)


@pytest.mark.parametrize("ours", [[500.0], [500.0, 500.0]], ids=["one run", "equal costs"])
def test_one_run_or_equal_costs_on_both_sides_have_no_interval(ours):
    """Evaluations are a grid, so equal costs are not exact."""
    assert cost_ratio(ours, [1000.0, 1000.0]) == Ratio(pytest.approx(0.5), None, None)
