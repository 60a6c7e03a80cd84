"""Figures in the texts are those of the committed records."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
_ROW = re.compile(
    r"^\| `(\w+)` \| ([\d,]+) \| ([\d.]+) \| ([\d.]+) to ([\d.]+) \| (\d+) of (\d+) \|$", re.MULTILINE
)


@pytest.mark.parametrize("page", ["README.md", "experiments/quickstart/README.md"])
def test_the_quickstarts_table_is_its_records(page: str) -> None:
    outcome = json.loads((ROOT / "results" / "quickstart" / "digits" / "outcome.json").read_text())
    expected = {
        arm["arm"]: (
            f"{arm['fresh_examples']['mean']:,.0f}",
            *(f"{arm[key]:.2f}" for key in ("ratio_to_baseline", "ratio_low", "ratio_high")),
            str(arm["reached"]),
            str(arm["searches"]),
        )
        for arm in outcome
        if arm["arm"] != "baseline"
    }
    assert {row[0]: row[1:] for row in _ROW.findall((ROOT / page).read_text())} == expected
