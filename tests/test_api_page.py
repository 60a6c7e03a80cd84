"""docs/api.md says what the code says."""

from importlib import import_module
from pathlib import Path

from scripts import api_page

PAGE = Path(__file__).resolve().parents[1] / "docs" / "api.md"


def test_the_page_of_public_names_is_current() -> None:
    assert PAGE.read_text() == api_page.page(), "run: python scripts/api_page.py > docs/api.md"


def test_every_public_name_is_on_it_and_described() -> None:
    for module in ("adaecho", "adaecho.echo", "adaecho.adascale", "adaecho.shards"):
        for name in import_module(module).__all__:
            assert any(name in names for names in api_page.PUBLIC.values()), f"{module}.{name}"
    assert [row for row in api_page.rows() if not row[2]] == []
