"""Run folders and sweeps received from others: nothing in them runs code, whatever command reads them."""

import json
import os
import pickle
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from adaecho import IndexedTarShards, show
from adaecho.config.schema import Config, from_plain, to_plain
from adaecho.config.tasks import find_task
from adaecho.errors import ConfigError, DataError, FolderError, UserError
from adaecho.figures import __main__ as figures
from adaecho.figures import committed
from adaecho.models.timm_models import read_weights
from adaecho.records import collect
from adaecho.records.files import read_yaml, yaml_text
from adaecho.records.folder import RunFolder
from adaecho.records.outcome import COLUMNS
from adaecho.search.design import Arm, Design, read_design, record_design
from adaecho.tasks import build_task
from adaecho.training import checkpoint
from adaecho.training.trial import run_trial
from tests.conftest import Compose, Refused
from tests.datasets.test_labelled_images import make
from tests.forks import typed
from tests.needs import first_form

PAYLOAD = """
import sys
from pathlib import Path
from tests.search.stub import Options, run_trial
Path("PWNED").touch()
def build(config, options_or_folder): return sys.modules[__name__]
def on_end(summary): pass
"""
ALL = """
import runpy, signal, sys
for arguments in {commands!r}:
    sys.argv = arguments
    try:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    except (SystemExit, Exception):
        pass
signal.alarm(0)  # of the exporter, which is to end soon when it is a process of its own
"""
COMMANDS = {
    "show": ["adaecho.show", "foreign/run"],
    "evaluate": ["adaecho.evaluate", "foreign/run"],
    "worker": ["adaecho.search.worker", "foreign/sweep"],
    "status": ["adaecho.search", "status", "foreign/sweep"],
    "collect sweep": ["adaecho.search", "collect", "foreign/sweep"],
    "collect runs": ["adaecho.records.collect", "foreign/run", "--experiment", "theirs"],
    "collect to tables": ["adaecho.records.collect", "foreign/sweep", "--command", "theirs"],
    "figures": ["adaecho.figures", "--results", "foreign"],
    "export": ["adaecho.records.exporter", "foreign/sweep", "offline", "adaecho"],
}


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A working folder with what was received: a run and a sweep that name a module of theirs."""
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "payload.py").write_text(PAYLOAD)
    return tmp_path


@pytest.fixture
def config(compose_config: Compose) -> Config:
    return compose_config("task=digits_mlp", "max_steps=1", "target.value=null", "echo.shuffle_buffer=1")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trained") / "run"


@pytest.fixture
def a_run(config: Config, trained: Path, tmp_path: Path) -> Path:
    """A run that was received, trained once."""
    run_trial(config, trained)
    return Path(shutil.copytree(trained, tmp_path / "run"))


def _with_records(folder: Path, theirs: dict[str, Any]) -> None:
    (folder / "foreign/run/config.yaml").write_text(yaml_text(theirs))
    sweep, table = folder / "foreign/sweep", folder / "foreign/x/foreign.payload"
    sweep.mkdir(exist_ok=True)
    record_design(Design((Arm("none", (), theirs),), 0, 1, 1, 0), sweep)
    (sweep / "trials.json").write_text(json.dumps(_rows(task="foreign.payload")))
    table.mkdir(parents=True, exist_ok=True)
    shutil.copy(sweep / "trials.json", table)


@pytest.mark.parametrize("kind", first_form("task", also=["callback"]))
def test_no_command_imports_what_a_record_names(foreign: Path, config: Config, kind: str) -> None:
    run_trial(config, foreign / "foreign/run")
    plain = to_plain(config)
    key, named, says = {
        "task": ("task", {**plain["task"], "name": "foreign.payload"}, "foreign.payload: is none of"),
        "callback": ("callbacks", ["foreign.payload"], "callbacks=[foreign.payload]: is no entry"),
    }[kind]
    _with_records(foreign, {**plain, key: named})
    there = [command for command in COMMANDS.values() if find_spec(command[0]) is not None]
    (foreign / "all_of_them.py").write_text(ALL.format(commands=there))
    done = typed("all_of_them", folder=foreign)
    assert done.code == 0, done.err
    assert says in done.err
    assert not (foreign / "PWNED").exists()
    # One that the user has typed is theirs to run.
    runner = ["--runner", "tests.search.stub:run_trial"] if kind == "task" else []
    done = typed(*COMMANDS["worker"], f"--{kind}", "foreign.payload", *runner, folder=foreign)
    assert done.code == 0, done.err
    assert (foreign / "PWNED").exists()


def test_a_record_names_our_tasks_and_installed_ones_alone() -> None:
    assert find_task("digits").build
    with pytest.raises(ConfigError, match=r"task\.name=json: .* a record can name no other"):
        find_task("json")
    with pytest.raises(ConfigError, match="has no function build"):
        find_task("json", ["json"])


@pytest.mark.parametrize(
    "value", ["${oc.env:HOME}", ["${oc.env:HOME}"], {"a": "http://evil/${oc.env:HOME}"}], ids=str
)
def test_a_record_sees_no_variable_of_the_environment(value: Any, compose_config: Compose) -> None:
    plain = to_plain(compose_config("task=digits"))
    plain["search"]["axes"] = value
    with pytest.raises(ConfigError, match=r"search\.axes.*: holds an interpolation"):
        from_plain(plain)


LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)
HOSTILE = {
    "aliases": (LAUGHS, "it holds an alias"),
    "itself": ("task: &a [*a]\n", "it holds an alias"),
    "object": ("task: !!python/object/apply:os.system [touch PWNED]\n", "python/object"),
    "module": ("task: !!python/name:foreign.payload.x\n", "python/name"),
    "pairs": ("!!pairs\n- task: digits\n", "it holds a tag, tag:yaml.org,2002:pairs"),
    "ordered": ("task: !!omap\n- name: digits\n", "it holds a tag, tag:yaml.org,2002:omap"),
    "binary": ("task: !!binary aGVsbG8=\n", "it holds a tag, tag:yaml.org,2002:binary"),
    "depth": ("[" * 100_000, "nested more than"),
    "depth of blocks": ("- " * 100_000 + "x", "nested more than"),
    "size": ("# " + "x" * (1 << 20) + "\n", "it has 1,048,579 bytes"),
    "number": (f"seed: {'9' * 5000}\n", "."),
    "bytes": ("task: \x01\n", "."),
    "list": ("- 1\n", "."),
}  # fmt: skip


@pytest.mark.parametrize(("text", "reason"), HOSTILE.values(), ids=list(HOSTILE))
def test_a_config_that_is_none_is_named(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(FolderError, match=rf"(?s)config\.yaml: damaged .*{reason}"):
        RunFolder(tmp_path).read_config()
    assert not Path("PWNED").exists()


def test_what_we_write_holds_no_alias(tmp_path: Path) -> None:
    same = ["one list", "in two places"]
    (tmp_path / "config.yaml").write_text(yaml_text({"a": same, "b": same}))
    assert read_yaml(tmp_path / "config.yaml") == {"a": same, "b": same}


@pytest.mark.parametrize(("file", "before"), [("config.yaml", "# overrides: "), ("metrics.jsonl", "")])
def test_a_run_with_a_line_nested_too_deeply_is_named(
    a_run: Path, tmp_path: Path, refused: Refused, file: str, before: str
) -> None:
    _, _, rest = (a_run / file).read_text().partition("\n")
    (a_run / file).write_text(f"{before}{'[' * 100_000}\n{rest}")
    said = refused(collect.main, a_run, "--experiment", "theirs", "--results", tmp_path / "results")
    assert f"error: {a_run}" in said
    assert not (tmp_path / "results").exists()


def _rows(**changes: Any) -> list[dict[str, Any]]:
    row = {"experiment": "x", "task": "digits", "arm": "none", "repeat": 0, "index": 0}
    return [row | changes]


@pytest.mark.parametrize(
    "changes",
    [{"experiment": "../../elsewhere"}, {"experiment": "/tmp/elsewhere"}, {"experiment": "a\0b"},
     {"arm": "../../../secret"}, {"arm": "![](http://evil/x.png)"}, {"arm": ["x"]}, {"repeat": "../.."},
     {"index": None}, {"task": ".."}],
    ids=str,
)  # fmt: skip
def test_a_table_of_theirs_leads_to_no_other_folder(
    tmp_path: Path, changes: dict[str, Any], refused: Refused
) -> None:
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep/trials.json").write_text(json.dumps(_rows(**changes)))
    results = tmp_path / "a/b/results"
    said = refused(collect.main, tmp_path / "sweep", "--results", results, "--command", "x")
    assert said.startswith("error: ")
    assert [one.name for one in tmp_path.iterdir()] == ["sweep"]


AXIS = {"low": 0.1, "high": 0.9, "scale": "linear"}


@pytest.mark.parametrize(
    "changes",
    [
        {"arms": {"../../x": {}}},
        {"arms": {"[/x]": {}}},
        {"arms": [1]},
        {"arms": {"a": {"overrides": [], "config": {"task": 1}, "axes": {}, "points": []}}},
        {"search": {"trials": 10**12}},
        {"search": {"trials": True, "repeats": 1}},
        {"search": {"trials": 10**5, "repeats": 10**5}},
        {"search": {"max_diverged": "2"}},
        {"arms": {"a": {"overrides": [], "config": {}, "axes": {"k": AXIS}, "points": []}}},
        {"arms": {"a": {"overrides": [], "config": {}, "axes": {"k": AXIS}, "points": [[]]}}},
    ],
    ids=str,
)
def test_a_design_of_theirs_is_one_or_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    record_design(Design((), 0, 1, 1, 0), tmp_path)
    plain = json.loads((tmp_path / "design.json").read_text())
    search = plain["search"] | changes.pop("search", {})
    for content in ({**plain, "search": search, **changes}, {}, []):
        (tmp_path / "design.json").write_text(json.dumps(content))
        with pytest.raises(FolderError, match=r"design\.json: is no sweep's design"):
            read_design(tmp_path)


def test_symbolic_links_in_a_run_lead_to_no_file_of_ours(a_run: Path, config: Config, tmp_path: Path) -> None:
    mine = tmp_path / "thesis.tex"
    mine.write_text("every word of it")
    (a_run / "pictures").mkdir()
    (a_run / "pictures/digits.png").symlink_to(mine)
    with pytest.raises(FolderError, match="leads elsewhere by a symbolic link"):
        show.show(a_run)
    (a_run / "metrics.jsonl").unlink(missing_ok=True)
    (a_run / "metrics.jsonl").symlink_to(mine)
    shutil.rmtree(a_run / "checkpoint")
    (a_run / "summary.json").unlink()
    with pytest.raises(FolderError, match=r"metrics\.jsonl"):
        run_trial(config, a_run)
    assert mine.read_text() == "every word of it"


def test_a_report_of_their_tables_shows_no_other_file(tmp_path: Path) -> None:
    table = tmp_path / "x/digits/trials.json"
    table.parent.mkdir(parents=True)
    (table.parent / "origin.json").write_text(json.dumps({"commands": ["```\n\n![](/etc/passwd.png)\n"]}))
    assert "`" not in committed.read_commands(table)[0]
    template = dict.fromkeys(COLUMNS, 1) | _rows()[0]
    template |= {"echo_variant": "none", "target_metric": "accuracy", "status": "reached", "counted": True}
    says = r"row 0 (is none: .* is no name|has (arm|target_metric) .* must be a (metric's )?name)"
    for changes in ({"arm": "![](/etc/x.png)"}, {"target_metric": "](/x)"}, {"![](/x)": 1}):
        table.write_text(json.dumps([template | changes]))
        with pytest.raises(DataError, match=says):
            committed.read_table(table)


def test_a_report_shows_no_other_picture_than_those_beside_their_table(
    tmp_path: Path, refused: Refused
) -> None:
    beside = tmp_path / "quickstart/digits"
    shutil.copytree(Path(__file__).parents[2] / "results/quickstart/digits", beside)
    (tmp_path / "mine").write_bytes(b"every word of it")
    picture = beside / "beside.jpg"
    picture.symlink_to(tmp_path / "mine")
    for name in ("%2e%2e%2f%2e%2e%2fmine.png", "a\n\n# heading.png"):
        (beside / name).write_bytes(b"")
    figures.main(["--results", str(tmp_path)])
    html = (tmp_path / "figures/report.html").read_text()
    assert not any(text in html for text in ("beside.jpg", "mine", "heading"))
    for put in (lambda: shutil.move(tmp_path / "mine", picture), lambda: os.mkfifo(picture)):
        picture.unlink()
        put()
        assert "beside.jpg: can't be shown" in refused(figures.main, "--results", tmp_path)


def test_a_small_table_of_theirs_fills_no_memory(tmp_path: Path) -> None:
    table = {"same": {str(name): 0 for name in range(3000)}, "columns": [], "rows": [[]] * 10_000}
    (tmp_path / "trials.json").write_text(json.dumps(table))
    with pytest.raises(DataError, match="30,000,000 values: no table of trials"):
        committed.read_table(tmp_path / "trials.json")


class _Payload:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("PWNED"),)


def _as_checkpoint(folder: Path, config: Config) -> None:
    """A whole checkpoint of the run, with its seal, whose state is theirs."""
    run = RunFolder(folder)
    with run.lock():
        run.start(to_plain(config), [], {})
        checkpoint.save(run, {"progress": _Payload(), "model": _Payload()})


def _as_extension(path: Path) -> None:
    """A parquet file whose schema names a pickled type (CVE-2023-47248 of Apache Arrow before 14.0.1)."""
    carried = {b"ARROW:extension:name": b"arrow.py_extension_type",
               b"ARROW:extension:metadata": pickle.dumps(_Payload())}  # fmt: skip
    kinds = {"img": pa.struct([("bytes", pa.binary()), ("path", pa.string())]), "label": pa.int64()}
    fields = [pa.field(name, kind, metadata=carried) for name, kind in kinds.items()]
    pq.write_table(pa.table([[{"bytes": b"x", "path": ""}], [1]], schema=pa.schema(fields)), path)


def test_no_file_of_theirs_brings_code_along(
    tmp_path: Path, compose_config: Compose, config: Config, refused: Refused
) -> None:
    _as_checkpoint(tmp_path / "run", config)
    assert "UnpicklingError" in refused(show.main, tmp_path / "run")
    with pytest.raises(FolderError, match="only code in it could make") as refusal:
        run_trial(config, tmp_path / "run")
    for said in (str(refusal.value), (tmp_path / "run/traceback.txt").read_text()):
        assert "weights_only" not in said, "torch advises to load it all the same"
        assert "can still be loaded" not in said
    make("tar", tmp_path / "shards")
    urls = sorted(map(str, (tmp_path / "shards").glob("train-*.tar")))
    theirs = np.array([_Payload()], object)
    np.savez(tmp_path / "index.npz", urls=theirs, shard_lengths=theirs, spans=theirs, versions=theirs)
    with pytest.raises(ValueError, match=r"index\.npz.*: it is damaged.*delete it"):
        IndexedTarShards(urls, index=tmp_path / "index.npz")
    torch.save({"weight": _Payload()}, tmp_path / "weights.pth")
    with pytest.raises(DataError, match="holds no weights that can be read without executing code"):
        read_weights(str(tmp_path / "weights.pth"))
    (tmp_path / "data").mkdir()
    _as_extension(tmp_path / "data/train-0.parquet")
    with pytest.raises(UserError):
        build_task(compose_config("task=cifar10", f"data.path={tmp_path / 'data'}"))
    assert not Path("PWNED").exists()
    pickle.loads(pickle.dumps(_Payload()))
    assert Path("PWNED").exists(), "the payload works where pickles are trusted"
