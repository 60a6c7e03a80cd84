"""The report starts with the paper's claims if its records decide any."""

import shutil
from pathlib import Path

import pytest

from experiments.evidence.__main__ import draw

COMMITTED = Path(__file__).resolve().parents[2] / "results"


@pytest.mark.parametrize(
    ("record", "first", "has_claims"),
    [
        ("split/digits", "A cost is read at", False),
        ("fig8_early/digits", "## Which of the paper's claims hold", True),
    ],
)
def test_only_a_report_with_records_of_claims_has_them(record: str, first: str, has_claims: bool) -> None:
    shutil.copytree(COMMITTED / record, Path("results") / record)
    Path("figures").mkdir()
    draw(Path("results"), Path("figures"))
    text = Path("figures/report.md").read_text()
    assert text.startswith(f"# Results\n\n{first}")
    assert ("the same before the ceiling: batch echoing" in text) == has_claims
    assert f"## {record.replace('/', ', ')}" in text
