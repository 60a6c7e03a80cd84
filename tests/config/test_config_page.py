"""docs/configuration.md says what the schema says."""

from pathlib import Path

from scripts import config_page

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"


def test_the_page_of_config_keys_is_current() -> None:
    remedy = "run: python scripts/config_page.py > docs/configuration.md"
    assert PAGE.read_text() == config_page.page(), remedy


def test_every_key_is_described() -> None:
    rows = [line for line in config_page.page().splitlines() if line.startswith("| `")]
    assert len(rows) > 60
    assert [row for row in rows if row.endswith("|  |")] == []
