"""Arms of an experiment without a target, from its rows."""

from itertools import count

from adaecho.records.outcome import ends, without_target

_repeats = count()


def row(arm, final, *, status="budget_spent", steps=100, **more):
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


def test_two_arms_by_hand():
    rows = [
        row("plain", 0.2),
        row("gain", 0.3, steps=50, gain=1.8, scale_invariant_steps=100.0),
        row("plain", 0.4, steps=200),
        row("gain", 0.1, steps=80, gain=1.2, scale_invariant_steps=100.0),
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
    first, second = row("a", 0.2), row("a", 9.0, status="diverged")
    del second["final_cross_entropy"]
    (arm,) = ends([first, second, row("a", 9.0, status="failed")])
    assert (arm["runs"], arm["diverged"], arm["failed"]) == (1, 1, 1)
    assert arm["final_cross_entropy"] == {"mean": 0.2, "min": 0.2, "max": 0.2}
    (arm,) = ends([second])
    assert arm["runs"] == 0
    assert arm["steps"] is None


def test_one_target_makes_it_another_kind_of_experiment():
    rows = [row("a", 0.2), row("b", 0.2)]
    assert without_target(rows)
    rows[1]["target_value"] = 0.9
    assert not without_target(rows)


def test_a_search_is_represented_by_its_best_trial_whichever_direction_is_better():
    trials = [
        row("a", 0.5, repeat=0, index=0, best_value=0.5),
        row("a", 0.3, repeat=0, index=1, best_value=0.3, steps=7),
        row("a", 0.4, repeat=1, index=0, best_value=0.4),
        row("a", 0.9, repeat=1, index=1, best_value=0.9, status="diverged"),
    ]
    (less,) = ends(trials)
    assert less["searched"]
    assert less["best_value"] == {"mean": 0.35, "min": 0.3, "max": 0.4}
    assert less["steps"]["min"] == 7
    (more,) = ends([{**trial, "target_metric": "accuracy"} for trial in trials])
    assert more["best_value"] == {"mean": 0.45, "min": 0.4, "max": 0.5}
