"""The report of records that decide the paper's claims and of those that don't."""

import shutil
from pathlib import Path

from experiments.evidence.__main__ import draw

COMMITTED = Path(__file__).resolve().parents[2] / "results"


def report_of(record: str) -> str:
    """Of this committed record alone."""
    shutil.copytree(COMMITTED / record, Path("results") / record)
    Path("figures").mkdir()
    draw(Path("results"), Path("figures"))
    return Path("figures/report.md").read_text()


def test_a_report_of_other_experiments_than_the_papers_says_nothing_of_its_claims() -> None:
    text = report_of("split/digits")
    assert text.startswith(
        "# Results\n\n* [split, digits: fresh examples to 97 % validation accuracy](#split-digits-"
    )
    assert "\n\nCosts are read off" in text
    assert "claim" not in text
    assert "## split, digits: fresh examples" in text


def test_a_report_of_the_papers_experiments_begins_with_its_claims() -> None:
    text = report_of("fig8_early/digits")
    contents, _, rest = text.partition("\n\n## ")
    assert contents.count("](#") == contents.count("\n* ") == 1
    assert rest.startswith("Which of the paper's claims hold")
    assert "the same before the ceiling: batch echoing" in text
