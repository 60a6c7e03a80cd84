"""Print the best points of searches as the arms of a sweep that tries them again on other seeds.

conf/experiment/quickstart_points.yaml and fig3_winners.yaml hold what these print:

python scripts/best_points.py results/quickstart_search/digits/trials.json 5
python scripts/best_points.py results/fig3/digits/trials.json

A table holds of an arm its echo, factor and point; what else it set (a model, buffers, a batch size) is to
be added.
"""

import argparse
from pathlib import Path

import yaml

from adaecho.records.outcome import counted_cost, searches
from adaecho.records.trials import Row, read_rows


def arms(rows: list[Row], points: int) -> dict[str, list[str]]:
    """So many of each search's points that needed the fewest fresh examples, as ``search.arms``.

    Arms are called after the search where there are several of an arm, else after the point.
    """
    several = any(row["repeat"] for row in rows)
    chosen = {}
    for (arm, repeat), search in searches(rows).items():
        reached = [(cost, row["index"], row) for row in search if (cost := counted_cost(row)) is not None]
        for _, index, row in sorted(reached, key=lambda each: each[:2])[:points]:
            chosen[f"{arm}_search{repeat}" if several else f"{arm}_p{index}"] = _overrides(row)
    return chosen


def _overrides(row: Row) -> list[str]:
    variant, factor = row["echo_variant"], row["echo_factor"]
    echo = [f"echo={variant}"] if variant == "none" else [f"echo={variant}", f"echo.factor={factor}"]
    point = [
        f"{key}={value:.4g}" if value % 1 else f"{key}={value:.0f}"
        for key, value in row["hyperparameters"].items()
    ]
    return [*echo, *point]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", type=Path, help="a trials.json in results/")
    parser.add_argument(
        "points", type=int, nargs="?", default=1, help="of each search (default: %(default)s)"
    )
    given = parser.parse_args()
    found = arms(read_rows(given.table), given.points)
    if not found:
        parser.error(f"{given.table}: no trial reached a target")
    print("# Echo, factor and point: add what else each arm set, which the table doesn't hold")
    print(yaml.safe_dump({"search": {"arms": found}}, sort_keys=False, width=1000), end="")
