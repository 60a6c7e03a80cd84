"""Write docs/claims.md from the records: of each claim command, cost, expected figure, tolerance and verdict.

python -m experiments.evidence.claims_page

Beside the claims: the winners on new seeds by each rule in the order in which they were fixed, ratios net of
what fills a buffer, and the pilots whose rules compare many intervals.
"""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from adaecho.errors import DataError, say, told
from adaecho.figures.committed import read_commands, read_tables
from adaecho.figures.report import Cells, markdown_table
from adaecho.records.files import record_errors, write_text
from adaecho.records.outcome import (
    Row,
    baseline_of,
    best_trials,
    by_arm,
    outcome,
    ratio_words,
    searched_costs,
)
from adaecho.records.statistics import Ratio, cost_ratio, welch_noise
from adaecho.records.table import ratio_interval
from experiments.evidence.decisions import (
    ABSENT,
    LEVEL,
    SAVING,
    Decision,
    costs_of_winners,
    decide_all,
    mean_logs,
    ratio_of_winners,
    spent,
)
from experiments.evidence.report import interval_words, p_words, turns_words, with_interval_words
from experiments.evidence.significance import holm, less_p

ROOT = Path(__file__).resolve().parents[2]
Tables = Mapping[tuple[str, str], Sequence[Row]]
"""Rows by experiment and task."""

_PAIRS = (
    ("batch_e2", "baseline"),
    ("example_after_e2", "baseline"),
    ("example_before_e2", "baseline"),
    ("example_after_e2", "batch_e2"),
    ("example_before_e2", "example_after_e2"),
)
_HEAD = """# What holds

*Made by `make figures` from the committed records; a test compares.*

Batch echoing at e = 2 saves nothing that is sure here; example echoing at e = 2 reads 0.55 to 0.8 of
the baseline's examples (digits, on seeds that chose nothing: [below](#winners-on-new-seeds)). No
workload of the paper was run to its own target with tuning."""
_RULES = """**Verdicts.** A claim *holds* where Welch's one-sided test of the log costs of the searches,
adjusted by Holm for the claims of its task, is below 5 %; claims of no harm and of equal time where
the 95 % interval stays within the margin. *Fragile*: it holds as searched and not in each other
reading of the same records (lower and upper three quarters of the axes; 1.5 and 2 times the error,
unless guessing meets that). *Not decided* says nothing about small effects: with three searches a
true ratio of 0.8 is mostly overlooked (column *sees 0.8*, at the level of Holm's first step). The
rules in full: `experiments/evidence/decisions.py`.

**A rule changed after its results.** Until commit `e24bd1a` a search that missed the target was
left out, a reading at chance counted (on CIFAR-10 40 % with 1.5 and 2 times the error is 10 % and
less than nothing), equal costs had no variance, and a reading more favourable to a claim could have
a weaker verdict. Now a miss costs at least what was read, guessing is no target, costs are known no
better than their grid of evaluations, and all other readings have one noise. The column *before*
has the verdicts of the rule before (`results/earlier_verdicts.json`). The rules of the claims
themselves were committed before their runs.

**Tolerance.** On the same kind of processor the same command repeats fresh examples exactly.
Elsewhere rounding differs from the first step on, and the effect of a rerun falls within the
*rerun* interval in 95 % of cases (root 2 times the half-width of the interval of one run). *t
alone*: p is smaller than ranks of so many searches can show, so it rests on the normal distribution
of log costs; the rank test's p is beside it."""
_WINNERS = """The best of many trials is partly luck, and not alike in every arm. {luck} So the winners of
`fig3` on digits were run again, in this order of rules. **First rule** (`b14791a`, its result in
`779d2c0`): the cheapest of an arm's 500 trials on 24 new seeds. It confirmed only that echoing
before augmentation saves and beats echoing after it. Then we changed it: **second rule**
(`096756e`), on the same 24 seeds, the winner of each of the five searches. **Third rule**
(`e24bd1a`), committed before its run on 24 seeds that nothing had seen: the five winners again,
one-sided p under Holm for the five ratios. *Cross-fit*: half of the seeds choose among the five
winners, the other half say what the choice costs. Ratios with 95 % intervals; below 1 the first arm
reads less."""
_LUCK = """On 24 other seeds the quickstart's points cost, against the best of 64 trials: {times}."""
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
_SPLITS = 2000  # of the seeds into those that choose and those that cost


def claims_page(decisions: Sequence[Decision], tables: Tables, results: Path) -> str:
    """The whole page.

    Args:
        decisions: of every claim on every task.
        tables: the rows that they were decided from.
        results: folder of the tables, with their commands and ``earlier_verdicts.json``.
    """
    parts = [_HEAD, overview(decisions), _RULES, *_experiments(decisions, tables, results)]
    parts += [*_winners(tables), *at_stated_points(tables), *pilots(tables), *net_of_buffers(tables)]
    return "\n\n".join(parts) + "\n"


def overview(decisions: Sequence[Decision]) -> str:
    """One row a claim, one column a task: effect and verdict."""
    by_claim: dict[str, dict[str, Decision]] = {}
    for one in decisions:
        if one.verdict != ABSENT:
            by_claim.setdefault(one.claim.says, {})[one.task] = one
    rows = [
        (says, *(_brief(of_task[task]) if task in of_task else "-" for task in TASKS))
        for says, of_task in by_claim.items()
    ]
    return markdown_table(("claim of the paper", *TASKS.values()), rows)


def _brief(one: Decision) -> str:
    if one.effect is None:
        return one.verdict
    value = one.effect.value
    return f"{f'{100 * value:+.2f} points' if one.claim.no_harm else f'{value:.2f}'}, {one.verdict}"


def _experiments(decisions: Sequence[Decision], tables: Tables, results: Path) -> list[str]:
    path = results / "earlier_verdicts.json"
    before = json.loads(path.read_text())["verdicts"] if path.exists() else []  # results of a rerun have none
    earlier = {(one["claim"], one["task"]): one["verdict"] for one in before}
    headings = (
        "claim",
        "effect",
        "95 % interval",
        "rerun",
        "p",
        "rank p",
        f"sees {SAVING}",
        "verdict",
        "before",
        "turned by",
    )
    parts = []
    for experiment, task in tables:
        found = [
            one for one in decisions if (one.claim.experiment, one.task) == (experiment, task) and one.effect
        ]
        if found:
            rows = [_claim_row(one, earlier.get((one.claim.key, task), "-")) for one in found]
            parts += [
                f"## {experiment} on {TASKS[task]}",
                _made_by(experiment, task, tables, results),
                markdown_table(headings, rows),
            ]
    return parts


def _claim_row(one: Decision, before: str) -> Cells:
    form = "+.4f" if one.claim.no_harm else ".2f"
    assert one.effect is not None
    return (
        one.claim.says,
        format(one.effect.value, form),
        interval_words(one.effect, form),
        interval_words(_of_a_rerun(one.effect, one.claim.no_harm), form),
        p_words(one),
        "-" if one.permutation_p is None else f"{one.permutation_p:.2g}",
        "-" if one.power is None else f"{100 * one.power:.0f} %",
        one.verdict,
        before,
        turns_words(one),
    )


def _of_a_rerun(effect: Ratio, is_difference: bool) -> Ratio:
    """The interval that holds a second run's effect in 95 % of cases: both runs have the noise."""
    if effect.low is None or effect.high is None:
        return effect
    to, back = (float, float) if is_difference else (math.log, math.exp)
    value, half = to(effect.value), (to(effect.high) - to(effect.low)) / math.sqrt(2)
    return Ratio(effect.value, back(value - half), back(value + half))


def _made_by(experiment: str, task: str, tables: Tables, results: Path) -> str:
    rows = tables[experiment, task]
    minutes = sum(row["train_time_s"] or 0 for row in rows) / 60
    page = experiment[:4]  # fig7a and fig7b share one, fig8 and fig8_early
    commands = "\n".join(read_commands(results / experiment / task / "trials.json"))
    return (
        f"```bash\n{commands}\n```\n\n{len(rows):,} runs, {minutes:,.0f} minutes of training on the machine "
        f"of the record; [what is compared and what it doesn't show](../experiments/{page}/README.md)."
    )


def _winners(tables: Tables) -> list[str]:
    searched, old, new = (
        tables.get((name, "digits")) for name in ("fig3", "fig3_winners", "fig3_winners_fresh")
    )
    lucky = {("quickstart", "digits"), ("quickstart_search", "digits")} <= tables.keys()
    if not searched or not old or not new or not lucky:
        return []
    adjusted = holm({f"{arm} {other}": _winners_p(new, arm, other) for arm, other in _PAIRS})
    rows = []
    for arm, other in _PAIRS:
        ours, theirs = (
            [cost.high for cost in searched_costs(by_arm(searched)[name])] for name in (arm, other)
        )
        third = ratio_of_winners(new, arm, other)
        p = adjusted[f"{arm} {other}"]
        rows.append((
            f"`{arm}` over `{other}`",
            with_interval_words(cost_ratio(ours, theirs)),
            with_interval_words(ratio_of_cheapest(old, searched, arm, other)),
            with_interval_words(ratio_of_winners(old, arm, other)),
            with_interval_words(third),
            f"{p:.2g}",
            _confirmed(p, third),
            *(f"{cross_fit(seeds, arm, other):.2f}" for seeds in (old, new)),
        ))  # fmt: skip
    headings = (
        "ratio",
        "best trials of the searches",
        "first rule",
        "second rule",
        "third rule",
        "p",
        "verdict",
        "cross-fit",
        "cross-fit, new seeds",
    )
    return [
        "## Winners on new seeds",
        _WINNERS.format(luck=_LUCK.format(times=_luck(tables))),
        markdown_table(headings, rows),
    ]


def _confirmed(p: float, ratio: Ratio | None) -> str:
    if p < LEVEL:
        return "confirmed"
    return "contradicted" if ratio is not None and ratio.low is not None and ratio.low > 1 else "left open"


def _winners_p(rows: Sequence[Row], arm: str, other: str) -> float:
    ours, theirs = mean_logs(rows, arm), mean_logs(rows, other)
    noise = welch_noise(ours, theirs)
    assert noise is not None
    return less_p(float(np.mean(ours) - np.mean(theirs)), noise)


def _luck(tables: Tables) -> str:
    """How many times what won a search its point costs on the quickstart's seeds, which didn't choose it."""
    best = best_trials(list(tables["quickstart_search", "digits"]))
    costs = by_arm(tables["quickstart", "digits"])
    times = {
        arm: np.exp(np.log([*map(spent, costs[arm])]).mean()) / best[arm, 0]["to_target_fresh_examples"]
        for arm in ("baseline", *(arm for arm, _ in _PAIRS[:3]))
    }
    return ", ".join(f"`{arm}` {value:.2f} times" for arm, value in times.items())


def ratio_of_cheapest(rows: Sequence[Row], searched: Sequence[Row], arm: str, other: str) -> Ratio | None:
    """Over the seeds, of the one winner that had the cheapest trial of all searches, of equals the first."""
    found = []
    for name in (arm, other):
        best = {repeat: row for (one, repeat), row in best_trials(list(searched)).items() if one == name}
        costs = costs_of_winners(rows, name)
        if not best or not costs:
            return None
        found.append(costs[min(best, key=lambda number: (best[number]["to_target_fresh_examples"], number))])
    return cost_ratio(found[0].tolist(), found[1].tolist())


def cross_fit(rows: Sequence[Row], arm: str, other: str) -> float | None:
    """The ratio if half of the seeds choose the winner and the other half say what it costs.

    The mean of the logarithm over 2,000 splits, drawn with a fixed seed: what was chosen is not what is
    counted.
    """
    # float64 [winners, seeds] each, of the same seeds.
    ours, theirs = (np.log([*costs_of_winners(rows, name).values()]) for name in (arm, other))
    if not ours.size or not theirs.size:
        return None
    rng = np.random.default_rng(0)
    differences = []
    for _ in range(_SPLITS):
        order = rng.permutation(ours.shape[1])
        choose, count = np.array_split(order, 2)  # int64 [seeds / 2] each
        means = [table[table[:, choose].mean(1).argmin()][count].mean() for table in (ours, theirs)]
        differences.append(means[0] - means[1])
    return float(np.exp(np.mean(differences)))


def at_stated_points(tables: Tables) -> list[str]:
    """Experiments that compare arms at one point each, without a search, to a target."""
    rows = [
        (
            experiment,
            TASKS.get(task, task),
            f"`{arm['arm']}`",
            str(arm["searches"]),
            ratio_words(arm),
            ratio_interval(arm),
        )
        for (experiment, task), table in tables.items()
        if experiment in _POINTS
        for arm in outcome(list(table))
        if arm["ratio_to_baseline"] is not None and arm["arm"] != arm["baseline"]
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
    return ["## Pilots of many intervals", _PILOTS, markdown_table(headings, rows)]


def _compared(experiment: str, rows: Sequence[Row]) -> dict[str, tuple[Ratio, float]]:
    if not rows:
        return {}
    of_reuse = experiment == "reuse"
    key = "to_target_fresh_examples" if of_reuse else "best_value"
    best = by_arm(best_trials(list(rows)).values())
    values = {arm: [row[key] for row in trials] for arm, trials in best.items()}
    if of_reuse:
        pairs = {
            f"E({arm['echo_factor']:g}), {arm['arm']}": (arm["baseline"], arm["arm"], arm["echo_factor"])
            for arm in outcome(list(rows))
            if arm["baseline"] != arm["arm"]
        }
    else:
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
        best = by_arm(best_trials(table).values())
        rows += [row for arm in arms for row in _net_row(experiment, task, arm, baseline_of(arm, arms), best)]
    headings = ("experiment", "task", "arm", "buffer's share", "ratio", "net")
    return ["## Net of the buffer", _NET, markdown_table(headings, rows)] if rows else []


def _net_row(
    experiment: str, task: str, arm: Row, baseline: str | None, best: Mapping[str, Sequence[Row]]
) -> list[Cells]:
    ours, theirs = best.get(arm["arm"], []), best.get(baseline or "", [])
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


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="folder of the tables")
    parser.add_argument("--into", type=Path, default=ROOT / "docs" / "claims.md", help="file of the page")
    options = parser.parse_args(arguments)
    with told(), record_errors(options.results, DataError):
        tables = read_tables(options.results)
        rows = {folder: rows for folder, (rows, _) in tables.items()}
        write_text(options.into, claims_page(decide_all(tables), rows, options.results), durable=False)
        say(options.into)


if __name__ == "__main__":
    main()
