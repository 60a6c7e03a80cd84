import os
import socket
import sys

import pytest

from adaecho.datasets import hub


@pytest.mark.parametrize("reachable", [True, False])
def test_the_hub_is_asked_only_where_its_name_is_known(
    monkeypatch: pytest.MonkeyPatch, reachable: bool
) -> None:
    def look_up(*_: object) -> list[object]:
        if not reachable:
            raise socket.gaierror(-2, "Name or service not known")
        return []

    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.delitem(sys.modules, "huggingface_hub", raising=False)
    monkeypatch.setattr(hub, "getproxies", dict)
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    hub.skip_retries_offline()
    assert os.environ.get("HF_HUB_OFFLINE") == (None if reachable else "1")
