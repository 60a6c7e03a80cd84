"""``docs/claims.md``: of each claim command, cost, expected figure, tolerance and verdict, from the records.

Beside the claims: the winners on new seeds by each rule in the order in which they were fixed, ratios net of
what fills a buffer, and the pilots whose rules compare many intervals.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from adaecho.figures.committed import read_commands
from adaecho.figures.decisions import ABSENT, LEVEL, SAVING, Decision
from adaecho.figures.readings import searched_costs
from adaecho.figures.report import (
    Cells,
    interval_words,
    markdown_table,
    p_words,
    turns_words,
    with_interval_words,
)
from adaecho.figures.side_tables import TASKS, Tables, at_stated_points, net_of_buffers, pilots
from adaecho.figures.winners import costs_of_winners, cross_fit, ratio_of_cheapest, ratio_of_winners
from adaecho.records.outcome import Row, best_trials
from adaecho.records.statistics import Ratio, cost_ratio, holm, less_p, welch_noise

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
rules in full: `adaecho/figures/decisions.py`.

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
    return f"{_number(one)}, {one.verdict}" if one.effect else one.verdict


def _number(one: Decision) -> str:
    assert one.effect is not None
    return f"{100 * one.effect.value:+.2f} points" if one.claim.no_harm else f"{one.effect.value:.2f}"


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
            [cost.high for cost in searched_costs([row for row in searched if row["arm"] == name])]
            for name in (arm, other)
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
    ours, theirs = (
        [float(np.log(costs).mean()) for costs in costs_of_winners(rows, name).values()]
        for name in (arm, other)
    )
    noise = welch_noise(ours, theirs)
    assert noise is not None
    return less_p(float(np.mean(ours) - np.mean(theirs)), noise)


def _luck(tables: Tables) -> str:
    """How many times what won a search its point costs on the quickstart's seeds, which didn't choose it."""
    best = best_trials(list(tables["quickstart_search", "digits"]))
    costs: dict[str, list[float]] = {}
    for row in tables["quickstart", "digits"]:
        costs.setdefault(row["arm"], []).append(row["to_target_fresh_examples"] or row["fresh_examples"])
    times = {
        arm: np.exp(np.log(costs[arm]).mean()) / best[arm, 0]["to_target_fresh_examples"]
        for arm in ("baseline", *(arm for arm, _ in _PAIRS[:3]))
    }
    return ", ".join(f"`{arm}` {value:.2f} times" for arm, value in times.items())
