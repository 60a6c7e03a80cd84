"""A test may be skipped where its program is absent, but not where the gate asks for it."""

import pytest

from tests.needs import needs


def test_the_absent_is_skipped_with_its_remedy_and_the_required_never(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for required, absent_is_told in (("other", False), ("other server", True)):
        monkeypatch.setenv("ADAECHO_REQUIRE", required)
        assert needs("server", present=True, remedy="install it").args == (False,)
        if absent_is_told:
            with pytest.raises(RuntimeError, match="server is absent; install it"):
                needs("server", present=False, remedy="install it")
        else:
            mark = needs("server", present=False, remedy="install it")
            assert (mark.args, mark.kwargs["reason"]) == ((True,), "server is absent; install it")
