"""A test may be skipped where its program is absent, but not where the gate asks for it."""

import pytest

from tests.needs import needs


def test_the_absent_is_skipped_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADAECHO_REQUIRE", "other")
    mark = needs("server", present=False, remedy="install it")
    assert mark.args == (True,)
    assert mark.kwargs["reason"] == "server is absent; install it"
    assert needs("server", present=True, remedy="install it").args == (False,)


def test_the_required_is_never_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADAECHO_REQUIRE", "other server")
    with pytest.raises(RuntimeError, match="server is absent; install it"):
        needs("server", present=False, remedy="install it")
    assert needs("server", present=True, remedy="install it").args == (False,)
