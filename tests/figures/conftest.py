"""Figures to look into."""

import pytest


@pytest.fixture
def drawn(monkeypatch):
    """Every figure that would be saved."""
    figures = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda self, *_, **__: figures.append(self))
    return figures
