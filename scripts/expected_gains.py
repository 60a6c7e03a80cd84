"""Write adaecho/headroom/expected.json from the committed records: what echoing at e = 2 saved.

python scripts/expected_gains.py
"""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "adaecho" / "headroom" / "expected.json"
# Each arm tuned by searches of its own, all variants at one factor: the paper's Fig. 3.
RECORDS = ("results/fig3/digits", "results/fig3/cifar10", "results/fig3/small_text")


def rows() -> list[dict[str, Any]]:
    """One row for each echoed arm of each record."""
    return [
        {
            "record": record,
            "variant": arm["echo_variant"],
            "factor": arm["echo_factor"],
            "fresh_ratio": round(arm["ratio_to_baseline"], 3),
            "low": round(arm["ratio_low"], 3),
            "high": round(arm["ratio_high"], 3),
        }
        for record in RECORDS
        for arm in json.loads((ROOT / record / "outcome.json").read_text())
        if arm["echo_variant"] != "none"
    ]


if __name__ == "__main__":
    FILE.write_text(json.dumps(rows(), indent=1) + "\n")
