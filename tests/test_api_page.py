"""docs/api.md and docs/configuration.md say what the code says."""

from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from scripts import api_page, config_page

DOCS = Path(__file__).resolve().parents[1] / "docs"


@pytest.mark.parametrize(("name", "script"), [("api.md", api_page), ("configuration.md", config_page)])
def test_a_generated_page_is_current(name: str, script: ModuleType) -> None:
    remedy = f"run: python scripts/{script.__name__.rpartition('.')[2]}.py > docs/{name}"
    assert (DOCS / name).read_text() == script.page(), remedy


def test_every_public_name_and_every_key_is_described() -> None:
    for module in ("adaecho", "adaecho.echo", "adaecho.adascale", "adaecho.shards"):
        for name in import_module(module).__all__:
            assert any(name in names for names in api_page.PUBLIC.values()), f"{module}.{name}"
    assert [row for row in api_page.rows() if not row[2]] == []
    keys = [line for line in config_page.page().splitlines() if line.startswith("| `")]
    assert len(keys) > 60
    assert [row for row in keys if row.endswith("|  |")] == []
