"""Access to drawn figures."""

import pytest


@pytest.fixture
def drawn(monkeypatch):
    """All figures that the test draws, without files."""
    figures = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda self, *_, **__: figures.append(self))
    return figures
