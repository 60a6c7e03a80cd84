"""Recompute every claim and pilot on the page of claims from the records, without the package.

The code follows the rules on the page and uses scipy's tests where possible. The package's results and the
committed page must agree with it.
"""

import json
import math
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results"
PAGE = (ROOT / "docs" / "claims.md").read_text()
DATA = {"digits": "digits", "CIFAR-10": "cifar10", "text": "small_text"}

# Sentences of the paper: the experiment, the two arms, and the compared quantity.
CLAIMS = {
    "batch echoing at e = 2 needs fewer fresh": ("fig3", "batch_e2", "baseline", "fresh"),
    "example echoing after augmentation at e = 2": ("fig3", "example_after_e2", "baseline", "fresh"),
    "example echoing before augmentation at e = 2": ("fig3", "example_before_e2", "baseline", "fresh"),
    "example echoing (after augmentation) needs": ("fig3", "example_after_e2", "batch_e2", "fresh"),
    "echoing before augmentation needs fewer": ("fig3", "example_before_e2", "example_after_e2", "fresh"),
    "where reading takes longer": ("fig4", "e5", "e1", "seconds"),
    "a fresh example takes at most 3% more": ("fig4", "e5", "e1", "rate"),
    "even e = 16 needs fewer": ("fig5", "e16", "e1", "fresh"),
    "batch echoing needs fewer with repeated": ("fig7a", "batch_e2_buffer16", "batch_e2_buffer0", "fresh"),
    "example echoing needs fewer with a larger":
        ("fig7b", "example_after_e2_buffer1024", "example_after_e2_buffer64", "fresh"),
    "batch echoing at e = 4 ends no worse": ("fig8", "batch_e4", "baseline", "metric"),
    "example echoing after augmentation at e = 4 ends": ("fig8", "example_after_e4", "baseline", "metric"),
    "example echoing before augmentation at e = 4 ends": ("fig8", "example_before_e4", "baseline", "metric"),
    "the same before the ceiling: batch echoing": ("fig8_early", "batch_e4", "baseline", "metric"),
    "before the ceiling: echoing after": ("fig8_early", "example_after_e4", "baseline", "metric"),
    "before the ceiling: echoing before": ("fig8_early", "example_before_e4", "baseline", "metric"),
}  # fmt: skip
TESTED = ("fresh", "seconds")  # by a p value; the other kinds by an interval


def table(experiment: str, task: str) -> list[dict[str, Any]]:
    raw = json.loads((RESULTS / experiment / task / "trials.json").read_text())
    return [raw["same"] | dict(zip(raw["columns"], row, strict=True)) for row in raw["rows"]]


def cheapest(rows: list[dict[str, Any]], arm: str) -> list[dict[str, Any]]:
    """The best trial of each search of an arm (the first of equals), in the order of the searches."""
    best: dict[int, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: (row["to_target_fresh_examples"] or math.inf, row["index"])):
        if row["arm"] == arm and row["counted"] and row["to_target_fresh_examples"] is not None:
            best.setdefault(row["repeat"], row)
    return [best[repeat] for repeat in sorted(best)]


def values(experiment: str, task: str, arm: str, kind: str) -> list[float]:
    rows = table(experiment, task)
    if kind == "metric":
        of_arm = [row for row in rows if row["arm"] == arm and row["counted"]]
        repeats = sorted({row["repeat"] for row in of_arm})
        return [max(row["best_value"] for row in of_arm if row["repeat"] == each) for each in repeats]
    costs = [(row["to_target_fresh_examples"], row["to_target_train_time_s"]) for row in cheapest(rows, arm)]
    return [{"fresh": fresh, "seconds": time_s, "rate": time_s / fresh}[kind] for fresh, time_s in costs]


def grid(experiment: str, task: str, arm: str) -> float | None:
    """Distance between evaluations of an arm's best trials; None without curves."""
    path = RESULTS / experiment / task / "curves.json"
    curves = json.loads(path.read_text()) if path.exists() else []
    gaps = [np.diff(one["fresh_examples"]) for one in curves if one["arm"] == arm]
    return float(np.median(np.concatenate(gaps))) if gaps else None


def welch(
    ours: list[float], theirs: list[float], least: tuple[float, float] = (0, 0)
) -> tuple[float, float, float]:
    """Difference of means, its standard error and degrees of freedom (Welch 1947)."""
    parts = []
    for side, floor in zip((ours, theirs), least, strict=True):
        variance = 0.0 if len(set(side)) == 1 else float(np.var(side, ddof=1))
        parts.append(max(variance, floor) / len(side))
    error = math.sqrt(sum(parts))
    below = sum(part**2 / (len(side) - 1) for part, side in zip(parts, (ours, theirs), strict=True))
    return float(np.mean(ours) - np.mean(theirs)), error, sum(parts) ** 2 / below


def compared(experiment: str, task: str, arm: str, other: str, kind: str) -> dict[str, Any]:
    sides = [values(experiment, task, name, kind) for name in (arm, other)]
    logs = [side if kind == "metric" else list(np.log(side)) for side in sides]
    least = [0.0, 0.0]
    for number, name in enumerate((arm, other) if kind in TESTED else ()):
        gap, fresh = grid(experiment, task, name), values(experiment, task, name, "fresh")
        least[number] = 0 if gap is None else float(np.mean([(gap / cost) ** 2 for cost in fresh])) / 12
    difference, error, freedom = welch(logs[0], logs[1], (least[0], least[1]))
    half = stats.t.ppf(0.975, freedom) * error
    ends, rerun = (np.array([0, -by, by]) * half + difference for by in (1, math.sqrt(2)))
    if kind != "metric":
        ends, rerun = np.exp(ends), np.exp(rerun)
    tested = kind in TESTED
    p = stats.t.cdf(difference / error, freedom) if tested else None
    return {"ends": ends, "rerun": rerun, "p": p, "rank": rank_p(*sides) if tested else None}


def rank_p(ours: list[float], theirs: list[float]) -> float:
    """Share of all splits of the runs with a rank sum at most as large."""
    ranks = stats.rankdata([*ours, *theirs])
    seen = ranks[: len(ours)].sum()
    sums = [sum(split) for split in combinations(ranks, len(ours))]
    return float(np.mean([one <= seen + 1e-9 for one in sums]))


def holm(p: list[float]) -> list[float]:
    order, adjusted, most = np.argsort(p), [0.0] * len(p), 0.0
    for position, index in enumerate(order):
        most = max(most, min(1.0, (len(p) - position) * p[index]))
        adjusted[index] = most
    return adjusted


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def cells(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


SECTIONS = re.findall(r"^## (fig\w+) on (.+)$", PAGE, re.M)


def of_sentence(sentence: str) -> tuple[str, str, str, str]:
    (found,) = [claim for words, claim in CLAIMS.items() if sentence.startswith(words)]
    return found


def claims_of(task: str) -> dict[str, dict[str, Any]]:
    """All claims of the page on a task, with p adjusted for their number."""
    rows = [row[0] for name, data in SECTIONS if data == task for row in cells(section(f"{name} on {data}"))]
    found = {}
    for sentence in rows:
        experiment, arm, other, kind = of_sentence(sentence)
        found[sentence] = compared(experiment, DATA[task], arm, other, kind)
    tested = [one for one in found.values() if one["p"] is not None]
    for one, p in zip(tested, holm([one["p"] for one in tested]), strict=True):
        one["holm"] = p
    return found


@pytest.mark.parametrize("task", DATA)
def test_claims(task: str) -> None:
    recomputed = claims_of(task)
    assert recomputed
    for experiment, data in SECTIONS:
        if data != task:
            continue
        for sentence, effect, interval, rerun, p, rank, *_ in cells(section(f"{experiment} on {data}")):
            found = recomputed[sentence]
            form = "+.4f" if found["p"] is None and experiment.startswith("fig8") else ".2f"
            value, low, high = (format(end, form) for end in found["ends"])
            assert effect == value, sentence
            assert interval == f"{low} to {high}", sentence
            assert rerun == " to ".join(format(end, form) for end in found["rerun"][1:]), sentence
            if found["p"] is None:
                assert (p, rank) == ("-", "-")
            else:
                assert p.removesuffix(", t alone") == f"{found['holm']:.2g}", sentence
                assert rank == f"{found['rank']:.2g}", sentence
                alone = found["holm"] < 1 / math.comb(*_sizes(sentence, task))
                assert p.endswith(", t alone") == alone, sentence


def _sizes(sentence: str, task: str) -> tuple[int, int]:
    experiment, arm, other, kind = of_sentence(sentence)
    ours, theirs = (len(values(experiment, DATA[task], name, kind)) for name in (arm, other))
    return ours + theirs, ours


def test_pilots() -> None:
    shown = cells(section("Pilots"))
    for experiment in ("reuse", "controls", "controls_cifar10"):
        rows = [row for row in shown if row[0] == experiment]
        assert rows
        pairs = [pilot(experiment, DATA[task], name) for _, task, name, *_ in rows]
        beyond = [
            float(stats.ttest_ind(np.asarray(ours) - math.log(factor), theirs, equal_var=False).pvalue)
            for ours, theirs, factor in pairs
        ]
        for row, (ours, theirs, _), p, adjusted in zip(rows, pairs, beyond, holm(beyond), strict=True):
            low, high = np.exp(stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval())
            ratio = math.exp(np.mean(ours) - np.mean(theirs))
            assert row[3:] == [f"{ratio:.2f} ({low:.2f} to {high:.2f})", f"{p:.2g}", f"{adjusted:.2g}"], row


def pilot(experiment: str, task: str, name: str) -> tuple[list[float], list[float], float]:
    """Logarithms of both sides, and the reference ratio."""
    rows = table(experiment, task)
    if experiment == "reuse":
        factor, arm = re.fullmatch(r"E\((\d+)\), (\w+)", name).groups()  # type: ignore[union-attr]
        other = re.sub(r"e\d+", "e1", arm)
        sides = ([row["to_target_fresh_examples"] for row in cheapest(rows, one)] for one in (other, arm))
        ours, theirs = (list(np.log(side)) for side in sides)
        return ours, theirs, float(factor)
    other, factor = re.fullmatch(r"echoed over (\w+), e = (\d)", name).groups()  # type: ignore[union-attr]
    arms = f"echoed_e{factor}", other if other == "new" else f"{other}_e{factor}"
    sides = ([min_loss(rows, arm, repeat) for repeat in range(3)] for arm in arms)
    ours, theirs = (list(np.log(side)) for side in sides)
    return ours, theirs, 1.0


def min_loss(rows: list[dict[str, Any]], arm: str, repeat: int) -> float:
    of_search = [row for row in rows if row["arm"] == arm and row["repeat"] == repeat and row["counted"]]
    return float(min(row["best_value"] for row in of_search))
