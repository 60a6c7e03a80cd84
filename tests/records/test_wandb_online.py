"""W&B's own client against a server on this machine: what it is sent, and that no run minds how it fails."""

import time
from pathlib import Path

import pytest

from adaecho.records import tracking
from adaecho.training.trial import run_trial
from tests.conftest import Compose
from tests.faults.campaign import fingerprint
from tests.needs import first_form
from tests.records.wandb_server import Server, serving

RUN_FOLDER = Path("run")
ONLINE = ("tracking=wandb", "tracking.mode=online")
RUN = (
    "task=digits_mlp", "max_steps=8", "target.value=null", "evaluate.every_fresh_examples=128",
    "echo.shuffle_buffer=1", "device=cpu",
)  # fmt: skip


@pytest.fixture(autouse=True)
def account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_MODE", "WANDB_SERVICE"):
        monkeypatch.delenv(name, raising=False)
    values = {"HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc"), "no_proxy": "*"}
    for name, value in {**values, "WANDB_API_KEY": "0123456789" * 4}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(tracking, "FINISH_WAIT_S", 240)


def _wait_until_asked(server: Server) -> None:
    """W&B's import takes a slow machine long, and the process that does it is a nice one."""
    deadline = time.monotonic() + 240
    while not server.sent and time.monotonic() < deadline:
        time.sleep(0.1)
    assert server.sent


@pytest.mark.parametrize(
    "kind", first_form("answers", "hangs", also=["errors", "refuses", "drops", "nonsense"])
)
def test_a_run_is_the_same_whatever_the_server_does(
    compose_config: Compose, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], kind: str
) -> None:
    run_trial(compose_config(*RUN), Path("untracked"))
    capfd.readouterr()
    with serving(kind) as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        config = compose_config(*RUN, *ONLINE)
        with tracking.exported(config.tracking, RUN_FOLDER):
            assert run_trial(config, RUN_FOLDER)["status"] == "budget_spent"
            assert fingerprint(RUN_FOLDER) == fingerprint(Path("untracked"))
            _wait_until_asked(server)
            monkeypatch.setattr(tracking, "FINISH_WAIT_S", 240 if kind == "answers" else 2)
        warned = capfd.readouterr().err.count("warning: tracking: ")
        if kind == "answers":
            assert warned == 0
            assert sum(b'\\"fresh_examples\\":' in one and b"accuracy" in one for one in server.sent)
        else:
            assert 1 <= warned <= 2, "by the process that exports, and by the one that has waited for it"
