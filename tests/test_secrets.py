"""User, password and query of a url stand in nothing that is kept, shown or sent to a tracker."""

import base64
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from adaecho import TarShards, masking
from adaecho.config.identity import run_id
from adaecho.config.schema import from_plain, to_plain
from adaecho.errors import ConfigError, UserError, fail, with_notes
from adaecho.records.folder import RunFolder
from adaecho.records.tracking import exported
from adaecho.training.trial import run_trial
from tests.conftest import Compose
from tests.forks import typed
from tests.servers import Quiet, serving
from tests.tasks.test_cifar10_shards import TINY, shards  # noqa: F401

USER, PASSWORD, SIGNATURE = "bob", "s3cretpw", "5ecre7sig/na+ture"
SECRETS = (PASSWORD, "5ecre7sig", base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode())


class _Guarded(Quiet):
    """Gives files to who knows both secrets."""

    def do_GET(self) -> None:  # noqa: N802
        basic = base64.b64decode(self.headers.get("Authorization", "Basic ").partition(" ")[2]).decode()
        if basic != f"{USER}:{PASSWORD}" or not self.path.endswith(f"X-Amz-Signature={SIGNATURE}"):
            self.send_error(403)
            return
        super().do_GET()


@pytest.fixture
def served(shards: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:  # noqa: F811
    """Overrides that name training and validation shards by urls with secrets."""
    monkeypatch.setenv("no_proxy", "*")
    with serving(shards, _Guarded) as place:
        at, query = f"http://{USER}:{PASSWORD}@{place}", f"?X-Amz-Signature={SIGNATURE}"
        yield [
            f"data.path='{at}/train-{{00..03}}.tar{query}'",
            f"task.validation_shards='{at}/validation.tar{query}'",
        ]


def holds_no_secret(*where: Path | str) -> None:
    texts = {str(one): one.encode() for one in where if isinstance(one, str)}
    for folder in (one for one in where if isinstance(one, Path)):
        files = [path for path in folder.rglob("*") if path.is_file()]
        assert files
        assert not [path for path in files if any(secret in path.name for secret in SECRETS)]
        texts |= {str(path): path.read_bytes() for path in files}
    found = {name: secret for name, text in texts.items() for secret in SECRETS if secret.encode() in text}
    assert not found


def test_a_run_keeps_none_and_goes_on_with_a_new_signature(
    compose_config: Compose, tmp_path: Path, served: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    run, tracked = tmp_path / "run", "tracking=wandb_offline"
    with exported(compose_config(tracked).tracking, run):
        run_trial(compose_config(*TINY, *served, "max_fresh_examples=12"), run, served)
    config = RunFolder(run).read_config()
    assert config is not None
    assert config["data"]["path"].startswith("http://***@127.0.0.1:")
    assert config["data"]["path"].endswith("/train-{00..03}.tar?***")
    renewed = [one.replace("X-Amz", "X-Amz-Date=1&X-Amz") for one in served]
    assert run_trial(compose_config(*TINY, *renewed), run, renewed)["fresh_examples"] == 24
    wrong = [one.replace(PASSWORD, f"{PASSWORD}2") for one in served]
    with pytest.raises(UserError, match=r"http://\*\*\*@.*403"):
        run_trial(compose_config(*TINY, *wrong, "max_fresh_examples=36"), run, wrong)
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert "403" in (run / "traceback.txt").read_text()
    said = capfd.readouterr()
    holds_no_secret(run, tmp_path / "wandb", said.out, said.err)


def test_a_sweep_keeps_none_and_its_workers_know_them(tmp_path: Path, served: list[str]) -> None:
    command = [
        *("adaecho.run", "-m", *TINY, *served, "tracking=none", "search.trials=1"),
        "hydra.sweep.dir=sweep", "search.workers=1", "echo=none,batch",
        "optimizer.learning_rate=0.001", "optimizer.momentum=0.5",  # or a trial diverges, and another follows
    ]  # fmt: skip
    done = typed(*command)
    assert done.code == 0, done.out + done.err
    assert len(list((tmp_path / "sweep").glob("*/*/*/summary.json"))) == 2
    again = typed(*command)
    assert "0 to run" in again.out
    holds_no_secret(tmp_path / "sweep", done.out, done.err, again.out, again.err)
    assert typed("adaecho.records.collect", "sweep", "--command", " ".join(served)).code == 0
    holds_no_secret(tmp_path / "results")
    # A worker that is started by hand is told of them by the environment alone.
    for summary in (tmp_path / "sweep").glob("*/*/*/summary.json"):
        summary.unlink()
        (summary.parent / "checkpoint/last.pt").unlink()
        (summary.parent / "checkpoint/previous.pt").unlink(missing_ok=True)
    refused = typed("adaecho.search.worker", "sweep")
    assert refused.code == 2
    assert "give the whole url, in the command or in the environment as ADAECHO_URLS" in refused.err
    urls = " ".join(one.partition("=")[2].strip("'") for one in served)
    assert typed("adaecho.search.worker", "sweep", ADAECHO_URLS=urls).code == 0
    assert len(list((tmp_path / "sweep").glob("*/*/*/summary.json"))) == 2


URLS = {
    "https://h/a.tar?X-Amz-Signature=abc&b=1": "https://h/a.tar?***",
    "https://bob:pw@h:80/a.tar": "https://***@h:80/a.tar",
    "https://bob:pw@h:80/a@b.tar": "https://***@b.tar",
    "https://bob:p/w@h/a.tar": "https://***@h/a.tar",
    "https://bob:12/w@h/a.tar?t=1": "https://***@h/a.tar?***",
    "https://bob:p#w@h/a.tar": "https://***@***",
    "https://bob:p?w@h/a.tar?t=1": "https://***@***",
    "https://bob:p@s/w@h/a.tar": "https://***@h/a.tar",
    "s3://KEY:SEC/RET@bucket/a.tar": "s3://***@bucket/a.tar",
    "https://h/a.tar;token=abc": "https://h/a.tar;***",
    "https://h/a.tar#access_token=abc&b=1": "https://h/a.tar#***",
    "https://h/get?url=https://u:pw@h2/a": "https://h/get?***",
    "https://h/a,https://u:pw@h2/b": "https://***@h2/b",
    "zip://a.tar::https://u:pw@h2/b": "zip://***@h2/b",
    "s3://key:p@ss@bucket/a.tar": "s3://***@bucket/a.tar",
    "simplecache::https://u:p@h/a?t=1": "simplecache::https://***@h/a?***",
    "at https://h/a?t=1: no, https://u@h2/b?c tried": "at https://h/a?*** no, https://***@h2/b?*** tried",
    "data.path='https://h/{0..9}.tar?t=1'": "data.path='https://h/{0..9}.tar?***",
    "//bob:pw@h/a.tar?t=1": "//***@h/a.tar?***",
    "data.path=//bob:pw@h/a@2x.tar": "data.path=//***@2x.tar",
    "no folder http:/bob:pw@h/a?t=1": "no folder http:/***@h/a?***",
    "bob:pw=@h.example:/a.tar": "***@h.example:/a.tar",
    "no 'bob:p:w@h:/a.tar': gone": "no '***@h:/a.tar': gone",
    'pipe:curl -H "Authorization: Bearer a.b=" https://h/a': 'pipe:curl -H "Authorization: Bearer ***" https://h/a',
    "pipe:curl -H authorization:abc https://h/a?t=1": "pipe:curl -H authorization:*** https://h/a?***",
}
NO_SECRETS = (
    "https://h/a.tar", "https://h/a@2x.tar", "https://h:80/a.tar", "no https://h/a.tar; ask me@all",
    "no https://h:80/a.tar: ask me@all", "//nas/share/a@b.tar", "//nas:8080/a@2x.tar", "/data//x:1@2.jpg",
    "bob@h:/a.tar", "a:b@c.tar", "10:30@site/x.jpg", "data/a:b@c:/x", "C:/a@b:/c", "key: one@h:/x",
    "author: one", "authorization: ", "no url? none@all", "/a/path?with=mark",
)  # fmt: skip
URLS |= {name: name for name in NO_SECRETS}


def test_what_is_masked_stays_as_it_is_within_a_sentence() -> None:
    for sentence in ("{}: a.jpg", "({}), {}; '{}'"):
        masked = sentence.replace("{}", "https://***@h/a.tar?***")
        assert masking.masked(masked) == masked


@pytest.mark.parametrize(("url", "shown"), URLS.items(), ids=list(URLS))
def test_what_is_shown_of_a_url(url: str, shown: str) -> None:
    assert masking.masked(url) == shown
    assert masking.masked(shown) == shown
    assert masking.masked({url: [(url,), 1, None]}) == {shown: [(shown,), 1, None]}


@pytest.mark.parametrize(
    "name", ["//bob:{}@h/a.tar", "bob:{}@h:/a.tar", "pipe:curl -H 'Authorization: Bearer {}'"]
)
def test_a_source_that_is_no_url_is_named_without_its_secret(name: str) -> None:
    masking.know([name.format("hunter22")])
    assert masking.presentable("hunter22") == "***"
    for given in (name, f"{name}*"):
        with pytest.raises((OSError, ValueError)) as raised:
            next(iter(TarShards(given.format(PASSWORD))))
        assert PASSWORD not in "".join(traceback.format_exception_only(raised.value))
    if "@" in name:
        assert masking.whole(name.format("***").replace("bob:", "")) == name.format("hunter22")


def test_a_run_is_named_by_what_is_shown(compose_config: Compose) -> None:
    def config(url: str) -> dict[str, Any]:
        return to_plain(compose_config("task=cifar10", f"data.path='{url}'"))

    assert run_id(config("https://h/a.tar?t=1")) == run_id(config("https://h/a.tar?t=2"))
    assert run_id(config("https://h/a.tar?t=1")) != run_id(config("https://h/b.tar?t=1"))
    record = masking.masked(config("https://only-here/a.tar?t=1"))
    assert from_plain(record).data.path == "https://only-here/a.tar?t=1"  # this process knows it
    for url in ("https://bob:p/w@only-here/a.tar", "https://only-here/b;token=1", "https://only-here/b#t=1"):
        assert from_plain(masking.masked(config(url))).data.path == url
    for part in ("train", "val"):
        masking.know([f"https://only-here:80/{part}.tar?by=me@home"])
    record["data"]["path"] = "https://***@***"
    with pytest.raises(ConfigError, match=r"what a record keeps of several urls.* @ are written .*%40"):
        from_plain(record)
    record["data"]["path"] = "https://nobody-knows/a.tar?***"
    unknown = r"data\.path: https://nobody-knows/a\.tar\?\*\*\* is what a record"
    with pytest.raises(ConfigError, match=unknown):
        from_plain(record)


def test_a_message_names_no_secret_that_a_library_takes_out_of_its_url(
    capsys: pytest.CaptureFixture[str],
) -> None:
    masking.know(["https://carol:hunter22@h/a?token=xyzzy%20plugh"])
    error = UserError("nonnumeric port: 'hunter22@h'; at /a?token=xyzzy%20plugh, decoded token=xyzzy plugh")
    error.add_note("of https://dave:pw@h/b")
    for text in (str(error), with_notes(error), repr(str(error))):
        assert not any(secret in text for secret in ("hunter22", "xyzzy", "dave"))
    with pytest.raises(SystemExit):
        fail("can't read https://erin:pw@h/c?sig=1")
    assert "erin" not in capsys.readouterr().err


def test_what_was_typed_is_not_printed_by_hydra_at_a_crash(tmp_path: Path) -> None:
    (tmp_path / "crash.py").write_text("from adaecho import run\nrun._headline = None\nrun.main()\n")
    done = typed("crash", "task=digits", "data.path=http://bob:s3cret77@host/x.tar", folder=tmp_path)
    assert done.code == 1
    assert "'NoneType' object is not callable" in done.err
    assert "s3cret77" not in done.out + done.err
