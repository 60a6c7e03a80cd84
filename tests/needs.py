"""Programs that some tests need, and parameters that only ``make test-all`` runs."""

import os
from collections.abc import Iterable
from typing import Any

import pytest


def needs(name: str, *, present: bool, remedy: str) -> pytest.MarkDecorator:
    """Skip tests if a program is absent.

    Raises:
        RuntimeError: the program is absent, but ``ADAECHO_REQUIRE`` (names separated by spaces) lists it.
    """
    reason = f"{name} is absent; {remedy}"
    if not present and name in os.environ.get("ADAECHO_REQUIRE", "").split():
        raise RuntimeError(
            f"{reason}. ADAECHO_REQUIRE={os.environ['ADAECHO_REQUIRE']!r} forbids to skip its tests"
        )
    return pytest.mark.skipif(not present, reason=reason)


def first_form(*forms: Any, also: Iterable[Any]) -> list[Any]:
    """Parameters: ``forms`` for the gate, and ``also`` for ``make test-all``."""
    return [*forms, *(pytest.param(form, marks=pytest.mark.other_forms) for form in also)]
