"""Small tar shards for several test files."""

from pathlib import Path

import pytest

from tests.shards.archives import NUM_EXAMPLES, write_shards


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_shards(tmp_path / "data", 4, NUM_EXAMPLES)
    return tmp_path / "data"
