"""Readings of branches whose worth follows the noise, runs against it, or has nothing to do with it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from adaecho.errors import DataError
from adaecho.records.trials import table_text
from experiments.evidence.__main__ import draw
from experiments.evidence.repeat_value import (
    BASELINE,
    BRANCHES,
    along_runs,
    beyond_position,
    draw_branches,
    measured,
    readings,
    section_of_branches,
)

RUNS, CHECKPOINTS = 12, (256, 512, 1024, 2048)
Worth = Callable[[str, float, float], float]


def rows_of(worth: Worth, gain: float = 0.5, seed: int = 0) -> list[dict[str, Any]]:
    """Branches with a worth of (variant, mu^2 over what is between, over what is within)."""
    rng, rows = np.random.default_rng(seed), []
    for run in range(RUNS):
        for at in CHECKPOINTS:
            between, within, square = rng.uniform(1, 2), rng.uniform(1, 2), rng.uniform(0.01, 0.1)
            known = {"seed": run, "fresh_examples": at, "loss_before": 2.0}
            known |= {"between": between, "within": within, "square": square}
            for variant, factor in (BASELINE, *BRANCHES):
                repeats = worth(variant, square / between, square / within) * (factor - 1)
                branch = {"echo_variant": variant, "echo_factor": factor}
                rows.append({**known, **branch, "loss_after": 2.0 - gain * (1 + repeats)})
    return rows


def in_common(variant: str, between: float, within: float) -> float:
    """mu^2 over the noise that repeats share: between alone, or both together."""
    return between if variant == "example_before_augmentation" else 1 / (1 / between + 1 / within)


def verdicts(rows: list[dict[str, Any]]) -> list[str]:
    return [row["verdict"] for row in readings(rows) if "verdict" in row]


def test_worth_and_signal_are_what_the_branches_were_made_with() -> None:
    rows = rows_of(in_common)
    found = measured(rows)
    assert found.fresh_examples.tolist() == list(CHECKPOINTS)
    assert found.worth == pytest.approx(found.signal / 32)
    of_last = [row for row in rows if row["seed"] == RUNS - 1 and row["fresh_examples"] == CHECKPOINTS[-1]]
    sigma_square = (of_last[0]["between"] + of_last[0]["within"]) / 32
    assert found.noise[0][-1, -1] == pytest.approx(sigma_square / of_last[0]["square"])


def test_worth_that_follows_the_shared_noise_is_predicted_along_runs_and_beyond_their_position() -> None:
    along, beyond = readings(rows_of(in_common))[:2]
    assert along["correlation"] == pytest.approx(1.0)
    assert beyond["correlation"] == pytest.approx(1.0)
    assert beyond["p"] == pytest.approx(1 / 10_001)
    assert (along["verdict"], beyond["verdict"]) == ("predicts", "predicts")


def test_an_advantage_that_follows_the_noise_within_copies_is_seen_by_the_split() -> None:
    def worth(variant: str, between: float, within: float) -> float:  # noqa: ARG001
        return 1 / within if variant == "example_before_augmentation" else 0.0

    split = readings(rows_of(worth))[2]
    assert split["correlation"] == pytest.approx(1.0)
    assert split["verdict"] == "predicts"


def test_worth_against_the_noise_is_the_reverse_and_one_without_it_is_not_predicted() -> None:
    assert verdicts(rows_of(lambda *about: -in_common(*about)))[:2] == ["the reverse", "does not"]
    rng = np.random.default_rng(3)
    assert verdicts(rows_of(lambda *_: rng.normal())) == ["does not", "does not", "does not"]


def test_correlations_are_spearmans() -> None:
    rng = np.random.default_rng(0)
    predictor, value = rng.normal(size=(2, 3, 5, 4)).round(1)  # [branches, runs, checkpoints], with ties

    def mean_of(*places: Any) -> float:
        return float(np.mean([stats.spearmanr(predictor[at], value[at]).statistic for at in places]))

    expected = [mean_of(*((branch, run) for branch in range(3))) for run in range(5)]
    assert along_runs(predictor, value) == pytest.approx(expected)
    found, p = beyond_position(predictor, value)
    assert found == pytest.approx(
        mean_of(*((branch, slice(None), at) for branch in range(3) for at in range(4)))
    )
    assert 0 < p <= 1


def test_a_checkpoint_where_new_examples_gain_nothing_is_left_out() -> None:
    rows = rows_of(in_common)
    for row in rows:
        if row["fresh_examples"] == 512:
            row["loss_after"] += 1.0
    assert measured(rows).fresh_examples.tolist() == [256, 1024, 2048]


def test_the_figure_and_the_report_say_what_the_readings_do(tmp_path: Path) -> None:
    rows = rows_of(in_common)
    draw_branches(rows, tmp_path / "it.png", "digits")
    assert (tmp_path / "it.png").stat().st_size > 10_000
    text = section_of_branches("digits", rows, "it.png", ["python it.py"])
    assert "| noise tells a repeat's worth along a run | 1.00 | 1.00 to 1.00 | predicts |" in text
    assert "p = 0.0001" in text
    assert text.endswith("```\npython it.py\n```")
    assert json.dumps(readings(rows))


def test_make_figures_draws_the_table_and_names_a_damaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed = Path(__file__).resolve().parents[2] / "results" / "split" / "digits"
    shutil.copytree(committed, tmp_path / "results" / "split" / "digits")
    table = tmp_path / "results" / "repeat_value" / "digits" / "branches.json"
    table.parent.mkdir(parents=True)
    table.write_text(table_text(rows_of(in_common)))
    (tmp_path / "figures").mkdir()
    written = draw(tmp_path / "results", tmp_path / "figures")
    assert tmp_path / "figures" / "repeat_value_digits.png" in written
    assert "tells a repeat's worth along a run" in (tmp_path / "figures" / "report.md").read_text()
    monkeypatch.setattr("experiments.evidence.__main__.draw_tables", lambda *_: ([], []))  # takes seconds
    table.write_text(table_text(rows_of(in_common)[:3]))
    with pytest.raises(DataError, match=r"branches.json: holds records of another form"):
        draw(tmp_path / "results", tmp_path / "figures")
    table.with_name("origin.json").write_text(json.dumps({"sha256": {"branches.json": "0"}}))
    with pytest.raises(DataError, match=r"branches.json: not what origin.json tells of"):
        draw(tmp_path / "results", tmp_path / "figures")
