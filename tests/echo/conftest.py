"""What tests of the loader share."""

import pytest

from adaecho.echo.threads import seeded_process
from tests.forks import FORKS


@pytest.fixture(autouse=True)
def _processes_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process of an augment would import torch anew; ``test_signals`` starts them as users do."""
    monkeypatch.setattr(seeded_process, "_PROCESSES", FORKS)
