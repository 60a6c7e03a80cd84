"""Print the best points of searches as the arms of a sweep that tries them again on other seeds.

conf/experiment/quickstart_points.yaml and fig3_winners.yaml hold what these print:

python scripts/best_points.py results/quickstart_search/digits/trials.json 5
python scripts/best_points.py results/fig3/digits/trials.json

A table holds of an arm its echo, factor and point; what else it set (a model, buffers, a batch size) is to
be added. Arms are called after the search where there are several of an arm, else after the point.
"""

import sys
from pathlib import Path

import yaml

from adaecho.records.outcome import counted_cost, searches
from adaecho.records.trials import Row, read_rows


def arms(rows: list[Row], points: int) -> dict[str, list[str]]:
    """So many of each search's points that needed the fewest fresh examples, as ``search.arms``."""
    chosen = {}
    for (arm, repeat), search in searches(rows).items():
        reached = sorted((cost, row["index"]) for row in search if (cost := counted_cost(row)) is not None)
        of_index = {row["index"]: row for row in search}
        for _, index in reached[:points]:
            row = of_index[index]
            echo = [f"echo={row['echo_variant']}"]
            if row["echo_variant"] != "none":
                echo.append(f"echo.factor={row['echo_factor']}")
            point = [
                f"{key}={value:{'.4g' if value % 1 else '.0f'}}"
                for key, value in row["hyperparameters"].items()
            ]
            several = any(row["repeat"] for row in rows)
            chosen[f"{arm}_search{repeat}" if several else f"{arm}_p{index}"] = [*echo, *point]
    return chosen


if __name__ == "__main__":
    table, number = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1
    print("# Echo, factor and point: add what else each arm set, which the table doesn't hold")
    found = {"search": {"arms": arms(read_rows(table), number)}}
    print(yaml.safe_dump(found, sort_keys=False, width=1000), end="")
