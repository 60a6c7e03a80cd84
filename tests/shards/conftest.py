"""Small tar shards for several test files."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.shards.archives import NUM_EXAMPLES, write_shards
from tests.shards.nginx import Proxy, nginx, proxied


@pytest.fixture(autouse=True)
def _no_other_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_shards(tmp_path / "data", 4, NUM_EXAMPLES)
    return tmp_path / "data"


@pytest.fixture
def proxy(folder: Path, tmp_path: Path) -> Iterator[Proxy]:
    """The shards behind nginx, and before that a proxy that can break transfers."""
    with nginx(tmp_path / "server", folder) as url, proxied(url) as started:
        yield started
