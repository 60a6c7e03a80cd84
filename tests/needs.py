"""What some tests need beyond the project's packages, and which forms of a promise the gate tests."""

import os
from collections.abc import Iterable
from typing import Any

import pytest


def needs(name: str, *, present: bool, remedy: str) -> pytest.MarkDecorator:
    """Skips tests where a program is absent.

    Raises:
        RuntimeError: it is absent, and ``ADAECHO_REQUIRE`` (names separated by spaces) says it must not be.
    """
    reason = f"{name} is absent; {remedy}"
    if not present and name in os.environ.get("ADAECHO_REQUIRE", "").split():
        raise RuntimeError(
            f"{reason}. ADAECHO_REQUIRE={os.environ['ADAECHO_REQUIRE']!r} forbids to skip its tests"
        )
    return pytest.mark.skipif(not present, reason=reason)


def first_form(*forms: Any, also: Iterable[Any]) -> list[Any]:
    """Values to parametrize with: those of the gate, and the others, which ``make test-all`` runs."""
    return [*forms, *(pytest.param(form, marks=pytest.mark.other_forms) for form in also)]
