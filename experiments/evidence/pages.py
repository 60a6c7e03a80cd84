"""``python -m experiments.evidence.pages``: the tables on the experiments' pages, anew from the records.

A table's rows stand on its page already; each is found by its first cell and its number of cells.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

from adaecho.errors import DataError, say, told
from adaecho.figures.committed import read_curves, read_table, read_whole
from adaecho.records.files import record_errors, write_text
from adaecho.records.outcome import Row, best_trials
from adaecho.records.statistics import cost_ratio
from experiments.evidence.decisions import FRAGILE, Decision, Records, decide
from experiments.schedule_clock import cells as schedule_clock

Table = list[list[str]]
"""The cells of successive rows."""

EXPERIMENTS = Path(__file__).parents[1]


def _arms(results: Path, record: str) -> dict[str, dict[str, Any]]:
    return {arm["arm"]: arm for arm in read_whole(results / record / "outcome.json")}


def _fresh(arm: dict[str, Any]) -> str:
    return f"{arm['fresh_examples']['mean']:,.0f}"


def _ratio(arm: dict[str, Any]) -> list[str]:
    """Of an arm to its baseline, and its interval."""
    low, high = arm["ratio_low"], arm["ratio_high"]
    return [f"{arm['ratio_to_baseline']:.2f}", "-" if low is None else f"{low:.2f} to {high:.2f}"]


def _costs(results: Path, record: str) -> Table:
    """The arms of a record: fresh examples, ratio, interval, steps, searches that reached."""
    return [
        [f"`{name}`", _fresh(arm), *_ratio(arm), f"{arm['steps']['mean']:,.0f}", _reached(arm)]
        for name, arm in _arms(results, record).items()
    ]


def _reached(arm: dict[str, Any]) -> str:
    return f"{arm['reached']} of {arm['searches']}"


def _quickstart(results: Path) -> list[Table]:
    arms = _arms(results, "quickstart/digits")
    del arms["baseline"]
    return [[[f"`{name}`", _fresh(arm), *_ratio(arm), _reached(arm)] for name, arm in arms.items()]]


def _quickstart_text(results: Path) -> list[Table]:
    """Both records; seconds of the first alone, whose runs had a machine to themselves."""
    arms = {"baseline": "baseline", "batch_e2": "batch, e = 2", "example_e2": "example, e = 2"}
    tables: list[Table] = []
    for record in ("quickstart_text", "text_imdb"):
        trials = read_table(results / record / "small_text/trials.json")
        fresh = {
            arm: [one["to_target_fresh_examples"] for one in trials if one["arm"] == arm] for arm in arms
        }
        table: Table = []
        for arm, costs in fresh.items():
            own = [one for one in trials if one["arm"] == arm]
            between = f" ({min(costs):,} to {max(costs):,})" if min(costs) < max(costs) else ""
            steps, seconds = (fmean(one[key] for one in own) for key in ("to_target_steps", "train_time_s"))
            ratio = f"{fmean(costs) / fmean(fresh['baseline']):.2f}"
            cells = [arms[arm], f"{fmean(costs):,.0f}{between}", ratio, f"{steps:.0f}"]
            table.append([*cells, "-" if tables else f"{seconds:.0f}"])
        tables.append(table)
    return tables


def _fig3(results: Path) -> list[Table]:
    """The winners on new seeds, and the verdicts of two evaluations in a row."""
    rows = read_table(results / "fig3_winners/digits/trials.json")
    names = ("baseline", "batch, e = 2", "example, after, e = 2", "example, before, e = 2")
    winners: Table = []
    for name, (arm, chosen) in zip(names, _arms(results, "fig3/digits").items(), strict=True):
        seeds: dict[str, list[int]] = {}
        for row in rows:
            if row["arm"].startswith(f"{arm}_search"):
                cost = row["to_target_fresh_examples"] or row["fresh_examples"]
                seeds.setdefault(row["arm"], []).append(cost)
        costs, best = [geometric_mean(one) for one in seeds.values()], chosen["fresh_examples"]["mean"]
        mean, low, high = geometric_mean(costs), min(costs), max(costs)
        winners.append(
            [name, f"{best:,.0f}", f"{mean:,.0f} ({low:,.0f} to {high:,.0f})", f"{mean / best:.1f}"]
        )
    return [winners, _in_a_row(results)]


def _in_a_row(results: Path) -> Table:
    def verdicts(fig3: str) -> list[Decision]:
        tables = {name: results / name / "cifar10/trials.json" for name in (fig3, "fig4")}
        rows: dict[str, Sequence[Row]] = {name[:4]: read_table(table) for name, table in tables.items()}
        curves: dict[str, Sequence[Row]] = {
            name[:4]: read_curves(table, list(rows[name[:4]])) for name, table in tables.items()
        }
        found = decide(Records(rows, curves), "cifar10")
        return [one for one in found if one.claim.experiment == "fig3"]

    names = (
        "batch echoing saves", "echoing after augmentation saves", "echoing before augmentation saves",
        "after augmentation beats batch echoing", "before augmentation beats after it",
    )  # fmt: skip
    table: Table = []
    for name, first, again in zip(names, verdicts("fig3"), verdicts("fig3_in_a_row"), strict=True):
        assert again.effect is not None
        both = again.verdict if again.verdict == first.verdict else FRAGILE
        interval = f"{again.effect.low:.2f} to {again.effect.high:.2f}"
        effect = [f"{again.effect.value:.2f}", interval, f"{again.p:.2g}"]
        table.append([name, *effect, again.verdict, first.verdict, both])
    return table


def _fig4(results: Path) -> list[Table]:
    arms = list(_arms(results, "fig4/cifar10").values())
    fresh, seconds = ([arm[key]["mean"] for arm in arms] for key in ("fresh_examples", "train_time_s"))
    table: Table = []
    for arm, one, time_s in zip(arms, fresh, seconds, strict=True):
        e, of_fresh, of_time = arm["echo_factor"], one / fresh[0], time_s / seconds[0]
        of_both = [f"{time_s:.1f}", f"{of_time:.2f}", f"{of_time / of_fresh:.3f}"]
        table.append([str(e), f"{one:,.0f}", f"{of_fresh:.2f}", f"{1 / e:.2f}", *of_both])
    return [table]


def _fig5(results: Path) -> list[Table]:
    arms = _arms(results, "fig5/digits")
    digits = [
        [
            str(e),
            *(
                cell
                for one in (f"e{e}", f"e{e}_batch128")
                for cell in (_fresh(arms[one]), *_ratio(arms[one]))
            ),
        ]
        for e in (2, 4, 8, 16)
    ]
    text = [
        [name[1:], _fresh(arm), *(["1", ""] if name == "e1" else _ratio(arm)), f"{arm['steps']['mean']:.0f}"]
        for name, arm in _arms(results, "fig5/small_text").items()
    ]
    return [digits, text]


def _fig6(results: Path) -> list[Table]:
    arms, kinds = _arms(results, "fig6/digits"), ("batch", "example_after", "example_before")
    return [[
        [str(size), _fresh(arms[f"baseline_batch{size}"])]
        + ["{} ({})".format(*_ratio(arms[f"{kind}_e2_batch{size}"])) for kind in kinds]
        for size in (16, 32, 64, 128)
    ]]  # fmt: skip


def _fig7(results: Path) -> list[Table]:
    batches, examples = _arms(results, "fig7a/digits"), _arms(results, "fig7b/digits")
    of_batches: Table = []
    for size in (0, 4, 8, 16):
        arm = batches[f"batch_e2_buffer{size}"]
        of_batches.append([str(size), _fresh(arm), *_ratio(arm)])
    of_examples: Table = []
    for size in (64, 256, 1024):
        pair = [examples[f"{arm}_buffer{size}"] for arm in ("baseline", "example_after_e2")]
        of_examples.append([f"{size:,}", *map(_fresh, pair), *_ratio(pair[1])])
    return [of_batches, of_examples]


def _controls(results: Path) -> list[Table]:
    tables: list[Table] = []
    for record in ("controls/digits", "controls_cifar10/cifar10"):
        best: dict[str, list[float]] = {}
        for row in best_trials(read_table(results / record / "trials.json")).values():
            best.setdefault(row["arm"], []).append(row["best_value"])
        table: Table = []
        for e in (2, 4):
            others = (f"once_e{e}", f"spaced_e{e}", "new")
            ratios = [cost_ratio(best[f"echoed_e{e}"], best[other]) for other in others]
            table.append([str(e), *(f"{one.value:.2f} ({one.low:.2f} to {one.high:.2f})" for one in ratios)])
        tables.append(table)
    return tables


def _bccd(results: Path) -> list[Table]:
    curves = read_whole(results / "bccd/coco/curves.json")
    keys = ("mAP_50", "AP_50/RBC", "AP_50/WBC", "AP_50/Platelets", "mAP")
    precisions: Table = []
    for arm in ("baseline", "example_before_e2"):
        ends = [curve["last"] for curve in curves if curve["arm"] == arm]
        precisions.append([f"`{arm}`", *(f"{fmean(end[key] for end in ends):.2f}" for key in keys)])
    return [_costs(results, "bccd/coco"), precisions, _costs(results, "quickstart_boxes/scenes")]


def _predicted_time(results: Path) -> list[Table]:
    record = read_whole(results / "predicted_time/paced/cells.json")
    cells = {(row["task"], row["R"], row["e"]): row for row in record["rows"]}
    tables: list[Table] = []
    for task in ("cifar10", "digits"):
        table: Table = []
        for ratio in (1.3, 2.0, 4.0):
            rows = [cells[task, ratio, e] for e in (1, 2, 4)]
            shown = [f"{row['measured_s']:.1f} s, {row['measured_over_predicted']:.2f}" for row in rows]
            faster = [
                ", ".join(f"{rows[0][key] / row[key]:.2f}" for row in rows[1:])
                for key in ("predicted_s", "measured_s")
            ]
            table.append([f"{ratio:g}", *shown, *faster])
        tables.append(table)
    return tables


def _repeat_value(results: Path) -> list[Table]:
    """Worths at equal steps: with their interval where the rule asks for them."""
    before, after = "example_before_augmentation", "example_after_augmentation"
    tables: list[Table] = []
    for task in ("digits", "text"):
        rows = read_whole(results / "equal_steps" / task / "outcome.json")
        cells = {
            (row["fresh_examples"], row["echo_variant"], row["echo_factor"]): row
            for row in rows
            if "ratio" in row
        }
        table: Table = []
        for at in sorted({at for at, *_ in cells}):
            shown = [f"{at:,}"]
            for variant, factor in ((one, e) for one in (before, "batch", after) for e in (2, 4)):
                if cell := cells.get((at, variant, factor)):
                    between = f" ({cell['low']:.2f} to {cell['high']:.2f})" if variant == before else ""
                    shown.append(f"{cell['ratio']:.2f}{between}")
            table.append(shown)
        tables.append(table)
    return tables


def _resnet32(results: Path) -> list[Table]:
    table: Table = []
    for record in ("resnet32", "resnet32_others", "resnet32_14k"):
        of_test = read_whole(results / record / "cifar10/test.json")
        rows = read_table(results / record / "cifar10/trials.json")
        for row in sorted(rows, key=lambda row: -row["steps"]):
            reached = "missed" if row["to_target_fresh_examples"] is None else "reached"
            end = "-" if row["final_accuracy"] is None else f"{row['final_accuracy']:.4f}"
            cells = (
                f"{row['steps']:,}",
                f"{row['fresh_examples']:,}",
                f"{row['best_value']:.4f}",
                reached,
                end,
            )
            table.append([f"`{row['arm']}`", *cells, f"{of_test[row['arm']]['accuracy']:.4f}"])
    return [table]


PAGES: dict[str, Callable[[Path], list[Table]]] = {
    "quickstart": _quickstart, "quickstart_text": _quickstart_text,
    "fig3": _fig3, "fig4": _fig4, "fig5": _fig5, "fig6": _fig6, "fig7": _fig7,
    "controls": _controls, "bccd": _bccd, "predicted_time": _predicted_time, "resnet32": _resnet32,
    "schedule_clock": schedule_clock.tables, "repeat_value": _repeat_value,
    "caltech101": lambda results: [_costs(results, "caltech101/imagenet")],
    "cifar10_depth8": lambda results: [
        _costs(results, f"{record}/cifar10") for record in ("cifar10_depth8", "cifar10_depth8_80")
    ],
}  # fmt: skip


def with_tables(page: str, tables: Sequence[Table]) -> str:
    """A page with its tables anew, which stand on it in this order.

    Raises:
        LookupError: one has no place on it.
    """
    lines, begin = page.splitlines(keepends=True), 0
    for table in tables:
        number = len(table)
        for first in range(begin, len(lines) - number + 1):
            stand = (line.strip().split(" | ") for line in lines[first : first + number])
            pairs = zip(stand, table, strict=True)
            if all(row[0] == f"| {cells[0]}" and len(row) == len(cells) for row, cells in pairs):
                break
        else:
            raise LookupError(f"no place for the table that begins with {' | '.join(table[0])}")
        lines[first : first + number] = [f"| {' | '.join(cells)} |\n" for cells in table]
        begin = first + number
    return "".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m experiments.evidence.pages", description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder of the tables")
    options = parser.parse_args(arguments)
    with told():
        for name, tables in PAGES.items():
            page = EXPERIMENTS / name / "README.md"
            with record_errors(page, DataError):
                write_text(page, with_tables(page.read_text(), tables(options.results)), durable=False)
            say(page)


if __name__ == "__main__":
    main()
