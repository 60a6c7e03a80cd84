import random
from itertools import count, groupby

import pytest

from adaecho.records.outcome import best_trials, ends, outcome, ratio_words, without_target

_repeats = count()


def trial(arm, repeat, index, cost, *, status=None, counted=True, factor=1, variant="none", time_s=1.0):
    """A trial that reached its target after ``cost`` fresh examples, or missed it (None)."""
    return {
        "arm": arm,
        "echo_variant": variant,
        "echo_factor": factor,
        "repeat": repeat,
        "index": index,
        "status": status or ("budget_spent" if cost is None else "reached"),
        "counted": counted,
        "target_metric": "accuracy",
        "target_value": 0.97,
        "fresh_examples": cost or 5000,
        "to_target_fresh_examples": cost,
        "to_target_steps": None if cost is None else cost // 32 * factor,
        "to_target_train_time_s": None if cost is None else time_s,
    }


def test_two_arms_by_hand():
    rows = [
        trial("baseline", 0, 0, 6400, time_s=2.0),
        trial("baseline", 0, 1, 3200, time_s=4.0),
        trial("baseline", 1, 0, None),
        trial("baseline", 1, 1, 9600, time_s=6.0),
        trial("batch_e2", 0, 0, 1600, factor=2, variant="batch"),
        trial("batch_e2", 1, 0, 4800, factor=2, variant="batch"),
    ]
    baseline, batch = outcome(rows)
    half = (
        12.706204736  # Student's t with one degree of freedom; costs lie one unit on either side of the mean
    )
    for cost, unit in (("fresh_examples", 3200), ("steps", 100), ("train_time_s", 1)):
        interval = baseline[cost].pop("low"), baseline[cost].pop("high")
        mean = baseline[cost]["mean"]
        assert interval == pytest.approx((mean - half * unit, mean + half * unit))
    assert baseline == {
        "arm": "baseline",
        "echo_variant": "none",
        "echo_factor": 1,
        "searches": 2,
        "reached": 2,
        "trials": 4,
        "diverged": 0,
        "missed": 1,
        "failed": 0,
        "fresh_examples": {"mean": 6400, "min": 3200, "max": 9600},
        "steps": {"mean": 200, "min": 100, "max": 300},
        "train_time_s": {"mean": 5.0, "min": 4.0, "max": 6.0},
        "baseline": "baseline",
        "ratio_to_baseline": 1.0,
        "ratio_low": None,
        "ratio_high": None,
    }
    expected = {"fresh_examples": (3200, 1600, 4800), "steps": (200, 100, 300)}
    for cost, numbers in expected.items():
        assert tuple(batch[cost][key] for key in ("mean", "min", "max")) == numbers
    # Of geometric means: (1600 * 4800) / (3200 * 9600) under the root.
    assert batch["ratio_to_baseline"] == pytest.approx(0.5)
    assert batch["ratio_low"] < 0.5 < batch["ratio_high"]


def test_a_tie_goes_to_the_lower_index_whatever_the_order():
    rows = [
        trial("a", 0, 2, 320, time_s=9.0),
        trial("a", 0, 1, 320, time_s=5.0),
        trial("a", 0, 0, 640, time_s=1.0),
    ]
    for order in (rows, rows[::-1]):
        assert best_trials(order)["a", 0]["index"] == 1
        assert outcome(order)[0]["train_time_s"]["mean"] == 5.0


def test_the_fastest_trial_does_not_win_over_the_one_with_fewest_fresh_examples():
    rows = [trial("a", 0, 0, 320, time_s=9.0), trial("a", 0, 1, 480, time_s=1.0)]
    assert outcome(rows)[0]["train_time_s"] == {"mean": 9.0, "min": 9.0, "max": 9.0}


def test_a_search_that_missed_the_target_lowers_reached_and_leaves_the_mean_to_the_others():
    rows = [trial("a", 0, 0, 320), trial("a", 1, 0, None), trial("a", 1, 1, None)]
    (arm,) = outcome(rows)
    assert (arm["searches"], arm["reached"], arm["missed"]) == (2, 1, 2)
    assert arm["fresh_examples"] == {"mean": 320, "min": 320, "max": 320}


def test_an_arm_that_never_reached_has_no_costs_and_no_ratio():
    rows = [trial("baseline", 0, 0, 320), trial("b", 0, 0, None, factor=4, variant="batch")]
    arm = outcome(rows)[1]
    assert arm["fresh_examples"] is arm["steps"] is arm["train_time_s"] is arm["ratio_to_baseline"] is None
    assert arm["reached"] == 0


def test_without_a_baseline_that_reached_there_is_no_ratio():
    rows = [trial("baseline", 0, 0, None), trial("b", 0, 0, 160, variant="batch")]
    assert [arm["ratio_to_baseline"] for arm in outcome(rows)] == [None, None]


def test_a_search_that_missed_costs_at_least_what_it_read():
    """640 of two searches against 320 and a miss after 5,000: at most the geometric means' ratio."""
    reached, missed = (320, 640), (320, None)

    def ratio(ours, theirs):
        rows = [trial("baseline", repeat, 0, cost) for repeat, cost in enumerate(theirs)]
        rows += [trial("b", repeat, 0, cost, factor=2, variant="batch") for repeat, cost in enumerate(ours)]
        arm = outcome(rows)[1]
        return arm["ratio_to_baseline"], arm.get("ratio_bound"), arm["ratio_low"] is None, arm

    value, bound, without_interval, arm = ratio(reached, missed)
    assert (value, bound, without_interval) == (pytest.approx((640 / 5000) ** 0.5), "at most", True)
    assert ratio_words(arm) == "<0.36"
    value, bound, without_interval, arm = ratio(missed, reached)
    assert (value, bound, without_interval) == (pytest.approx((5000 / 640) ** 0.5), "at least", True)
    assert ratio_words(arm) == ">2.80"
    assert ratio(missed, missed)[:3] == (None, None, True)
    value, bound, without_interval, arm = ratio(reached, reached)
    assert (value, bound, without_interval) == (pytest.approx(1), None, False)
    assert ratio_words(arm) == "1.00"


def test_diverged_failed_and_surplus_trials_do_not_count():
    rows = [
        trial("a", 0, 0, None, status="diverged", counted=False),
        trial("a", 0, 1, 640),
        trial("a", 0, 2, None, status="failed", counted=False),
        trial("a", 0, 3, 160, counted=False),  # beyond the budget of the search
        trial("a", 0, 4, None, status="running", counted=False),
    ]
    (arm,) = outcome(rows)
    assert (arm["trials"], arm["diverged"], arm["failed"], arm["missed"]) == (1, 1, 1, 0)
    assert arm["fresh_examples"]["mean"] == 640


@pytest.mark.parametrize(
    ("names", "ratios"),
    [
        (("plain", "batch_e2"), [1.0, 2.0]),  # the only arm without echoing
        (("plain", "baseline"), [0.5, 1.0]),  # the one that is called so
        (("plain", "other"), [None, None]),  # two without echoing, neither called so
    ],
)
def test_which_arm_is_the_baseline(names, ratios):
    variants = ["none", "batch" if names[1] == "batch_e2" else "none"]
    rows = [
        trial(name, 0, 0, cost, variant=variant)
        for name, cost, variant in zip(names, (320, 640), variants, strict=True)
    ]
    assert [arm["ratio_to_baseline"] for arm in outcome(rows)] == [
        ratio and pytest.approx(ratio) for ratio in ratios
    ]


def test_each_arm_is_compared_with_the_one_of_its_settings():
    arms = {
        "plain32": ("none", 1, 32, 320),
        "plain128": ("none", 1, 128, 640),
        "e2_32": ("batch", 2, 32, 240),
        "e2_128": ("batch", 2, 128, 320),
        "e2_64": ("batch", 2, 64, 320),
    }
    rows = [
        {**trial(name, 0, 0, cost, variant=variant, factor=factor), "batch_size": size, "shuffle_buffer": 8}
        for name, (variant, factor, size, cost) in arms.items()
    ]
    found = {arm["arm"]: arm for arm in outcome(rows)}
    assert [arm["baseline"] for arm in found.values()] == ["plain32", "plain128", "plain32", "plain128", None]
    assert found["e2_32"]["ratio_to_baseline"] == pytest.approx(0.75)
    assert found["e2_128"]["ratio_to_baseline"] == pytest.approx(0.5)
    rows[-1]["baseline"] = "plain128"
    assert outcome(rows)[-1]["ratio_to_baseline"] == pytest.approx(0.5)


def test_no_rows_no_arms():
    assert outcome([]) == []


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


def run(arm, final, *, status="budget_spent", steps=100, **more):
    """A run without a target that ended with a loss of ``final``."""
    return {
        "repeat": next(_repeats),
        "index": 0,
        "target_metric": "cross_entropy",
        "arm": arm,
        "echo_variant": "none",
        "echo_factor": 1,
        "status": status,
        "target_value": None,
        "fresh_examples": 32 * steps,
        "steps": steps,
        "trained_examples": 32 * steps,
        "final_cross_entropy": final,
        "best_value": final / 2,
        **more,
    }


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


def test_runs_that_did_not_come_to_the_end_are_counted_and_not_averaged():
    first, second = run("a", 0.2), run("a", 9.0, status="diverged")
    del second["final_cross_entropy"]
    (arm,) = ends([first, second, run("a", 9.0, status="failed")])
    assert (arm["runs"], arm["diverged"], arm["failed"]) == (1, 1, 1)
    assert arm["final_cross_entropy"] == {"mean": 0.2, "min": 0.2, "max": 0.2}
    (arm,) = ends([second])
    assert arm["runs"] == 0
    assert arm["steps"] is None


def test_one_target_makes_it_another_kind_of_experiment():
    rows = [run("a", 0.2), run("b", 0.2)]
    assert without_target(rows)
    rows[1]["target_value"] = 0.9
    assert not without_target(rows)


def test_a_search_is_represented_by_its_best_trial_whichever_direction_is_better():
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
