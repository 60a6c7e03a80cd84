"""Sections of ``docs/claims.md`` beside the claims: pilots of many comparisons, costs net of the buffer."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from adaecho.figures.report import Cells, markdown_table, with_interval_words
from adaecho.records.outcome import Row, baseline_of, best_trials, outcome, ratio_words
from adaecho.records.statistics import Ratio, cost_ratio, holm, less_p, welch_noise

Tables = Mapping[tuple[str, str], Sequence[Row]]
"""Rows by experiment and task."""

TASKS = {"digits": "digits", "cifar10": "CIFAR-10", "small_text": "text"}
# Of records whose rows don't hold it: the tasks' own, in conf/task/ at the commits that they name.
_BUFFERS = {("fig3", "digits"): 256, ("cifar10_echo", "cifar10"): 10_000}
_SHARE = 0.05  # of a cost, from which on the filling of a buffer is told apart
_POINTS = (
    *("quickstart", "quickstart_text", "quickstart_boxes", "text_imdb", "lm1b_slice", "caltech101", "bccd"),
    *("cifar10_depth8", "cifar10_depth8_80", "cifar10_echo"),
)
_AT_POINTS = """Ratios of fresh examples to the baseline's, all arms at one point (the quickstart: each at
its own, found on other seeds). They decide no claim. In `bccd`, `cifar10_echo` and `cifar10_depth8_80` the
rate falls with steps, of which an echoed run takes as many from half the fresh examples: their ratios are
too good by as much as the schedule saves. What each of the two saves:
[schedule_clock](../experiments/schedule_clock/README.md). Pages: [experiments/](../experiments)."""
_PILOTS = """[Reuse](../experiments/reuse/README.md): whether E(e), the baseline's fresh examples over the
arm's, differs from e. [Controls](../experiments/controls/README.md): whether the least cross entropies
differ. Three searches each; two-sided p by Welch, and adjusted by Holm for the comparisons of an
experiment on a task."""
_NET = """A shuffle buffer of B examples takes B fresh examples before the first step without echoing and
under batch echoing, and B / e under example echoing; one of b repeated batches the examples of b / e.
Where that is more than 5 % of a cost: the ratio without it, beside the one in the tables."""


def at_stated_points(tables: Tables) -> list[str]:
    """Experiments that compare arms at one point each, without a search, to a target."""
    rows = [
        (
            experiment,
            TASKS.get(task, task),
            f"`{arm['arm']}`",
            str(arm["searches"]),
            ratio_words(arm),
            interval,
        )
        for (experiment, task), table in tables.items()
        if experiment in _POINTS
        for arm in outcome(list(table))
        if arm["ratio_to_baseline"] is not None and arm["arm"] != arm["baseline"]
        for interval in [
            "-" if arm["ratio_low"] is None else f"{arm['ratio_low']:.2f} to {arm['ratio_high']:.2f}"
        ]
    ]
    headings = ("experiment", "task", "arm", "runs an arm", "ratio", "95 % interval")
    return ["## At stated points", _AT_POINTS, markdown_table(headings, rows)] if rows else []


def pilots(tables: Tables) -> list[str]:
    """Comparisons whose rule was an interval each: their p, two-sided, and adjusted for their number."""
    rows = []
    for experiment, task in (("reuse", "digits"), ("controls", "digits"), ("controls_cifar10", "cifar10")):
        found = _compared(experiment, tables.get((experiment, task), ()))
        adjusted = holm({name: p for name, (_, p) in found.items()})
        rows += [
            (
                experiment,
                TASKS[task],
                name,
                with_interval_words(ratio),
                f"{found[name][1]:.2g}",
                f"{adjusted[name]:.2g}",
            )
            for name, (ratio, _) in found.items()
        ]
    if not rows:
        return []
    headings = ("experiment", "task", "compared", "ratio", "p", "p, Holm")
    return [
        "## Pilots of many intervals",
        _PILOTS,
        markdown_table(headings, rows),
    ]


def _compared(experiment: str, rows: Sequence[Row]) -> dict[str, tuple[Ratio, float]]:
    values: dict[str, list[float]] = {}
    if not rows:
        return {}
    if experiment == "reuse":
        for (arm, _), row in best_trials(list(rows)).items():
            values.setdefault(arm, []).append(row["to_target_fresh_examples"])
        arms = outcome(list(rows))
        pairs = {
            f"E({arm['echo_factor']:g}), {arm['arm']}": (
                arm["baseline"],
                arm["arm"],
                float(arm["echo_factor"]),
            )
            for arm in arms
            if arm["baseline"] != arm["arm"]
        }
    else:
        for row in best_trials(list(rows)).values():
            values.setdefault(row["arm"], []).append(row["best_value"])
        pairs = {
            f"echoed over {other.partition('_')[0]}, e = {factor}": (f"echoed_e{factor}", other, 1.0)
            for factor in (2, 4)
            for other in (f"once_e{factor}", f"spaced_e{factor}", "new")
        }
    return {
        name: (cost_ratio(values[one], values[other]), _two_sided(values[one], values[other], expected))
        for name, (one, other, expected) in pairs.items()
    }


def _two_sided(ours: Sequence[float], theirs: Sequence[float], expected: float) -> float:
    arm, other = np.log(ours), np.log(theirs)  # [searches] each
    noise = welch_noise(arm, other)
    assert noise is not None
    return 2 * less_p(-abs(float(arm.mean() - other.mean()) - math.log(expected)), noise)


def net_of_buffers(tables: Tables) -> list[str]:
    """Ratios without the fresh examples that fill a buffer before the first step, where these are many."""
    rows = []
    for (experiment, task), table in tables.items():
        size = table[0].get("shuffle_buffer", _BUFFERS.get((experiment, task)))
        if table[0]["target_value"] is None or size is None or experiment.startswith("fig3_winners"):
            continue
        table = [{"shuffle_buffer": size, **row} for row in table]
        arms = outcome(table)
        best = {
            arm["arm"]: [row for (name, _), row in best_trials(table).items() if name == arm["arm"]]
            for arm in arms
        }
        rows += [row for arm in arms for row in _net_row(experiment, task, arm, baseline_of(arm, arms), best)]
    headings = ("experiment", "task", "arm", "buffer's share", "ratio", "net")
    return ["## Net of the buffer", _NET, markdown_table(headings, rows)] if rows else []


def _net_row(
    experiment: str, task: str, arm: Row, baseline: str | None, best: Mapping[str, Sequence[Row]]
) -> list[Cells]:
    ours, theirs = best[arm["arm"]], best.get(baseline or "", [])
    if baseline == arm["arm"] or not ours or not theirs or any(row["echo_factor"] == "auto" for row in ours):
        return []
    costs = [np.array([row["to_target_fresh_examples"] for row in one], float) for one in (ours, theirs)]
    fills = [filling(one[0]) for one in (ours, theirs)]
    share = max(fill / cost.mean() for fill, cost in zip(fills, costs, strict=True))
    if share <= _SHARE:
        return []
    net = [cost - fill for cost, fill in zip(costs, fills, strict=True)]
    known = all((one > 0).all() for one in net)
    return [(
        experiment,
        TASKS.get(task, task),
        f"`{arm['arm']}`",
        f"{100 * share:.0f} %",
        f"{cost_ratio(costs[0].tolist(), costs[1].tolist()).value:.2f}",
        f"{cost_ratio(net[0].tolist(), net[1].tolist()).value:.2f}" if known else "-",
    )]  # fmt: skip


def filling(row: Row) -> float:
    """Fresh examples read before the first step of a run."""
    factor, batches = float(row["echo_factor"]), row.get("batch_shuffle_buffer") or 0
    examples = float(row["shuffle_buffer"] + (batches * row["batch_size"] / factor if batches else 0))
    return examples / factor if row["echo_variant"].startswith("example") else examples
