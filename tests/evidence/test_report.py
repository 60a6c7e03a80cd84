"""The report and the page of claims, of records that decide the paper's claims and of those that don't."""

import shutil
from pathlib import Path

import pytest

from experiments.evidence import claims_page
from experiments.evidence.__main__ import draw

COMMITTED = Path(__file__).resolve().parents[2] / "results"


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return tmp_path / "results"


def test_a_report_of_other_experiments_than_the_papers_says_nothing_of_its_claims(results: Path) -> None:
    shutil.copytree(COMMITTED / "split" / "digits", results / "split" / "digits")
    (results / "figures").mkdir()
    draw(results, results / "figures")
    text = (results / "figures" / "report.md").read_text()
    assert text.startswith(
        "# Results\n\n* [split, digits: fresh examples to 97 % validation accuracy](#split-digits-"
    )
    assert "\n\nCosts are read off" in text
    assert "claim" not in text
    assert "## split, digits: fresh examples" in text


def test_a_report_of_the_papers_experiments_begins_with_its_claims(results: Path) -> None:
    shutil.copytree(COMMITTED / "fig8_early" / "digits", results / "fig8_early" / "digits")
    (results / "figures").mkdir()
    draw(results, results / "figures")
    text = (results / "figures" / "report.md").read_text()
    contents, _, rest = text.partition("\n\n## ")
    assert contents.count("](#") == contents.count("\n* ") == 1
    assert rest.startswith("Which of the paper's claims hold")
    assert "the same before the ceiling: batch echoing" in text
    assert "not yet measured" in text, "claims of other experiments have no records here"


def test_the_page_of_claims_can_be_made_of_any_results(results: Path, tmp_path: Path) -> None:
    shutil.copytree(COMMITTED / "quickstart" / "digits", results / "quickstart" / "digits")
    claims_page.main(["--results", str(results), "--into", str(tmp_path / "claims.md")])
    page = (tmp_path / "claims.md").read_text()
    assert page.startswith("# What holds")
    assert "## Winners on new seeds" not in page
