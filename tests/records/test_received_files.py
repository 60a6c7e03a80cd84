"""What stands in place of a run's files, in a folder received from others: links, pipes, bombs."""

import io
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from adaecho.config.schema import Config, to_plain
from adaecho.errors import DiskError, FolderError, UserError
from adaecho.evaluate import evaluate
from adaecho.figures.committed import read_table
from adaecho.records import checkpoints
from adaecho.records.files import append
from adaecho.records.folder import RunFolder
from adaecho.records.lock import is_held
from adaecho.training import checkpoint
from adaecho.training.trial import run_trial
from tests.conftest import Compose

RUN = ("task=digits_mlp", "max_steps=1", "target.value=null", "echo.shuffle_buffer=1")


@pytest.fixture
def config(compose_config: Compose) -> Config:
    return compose_config(*RUN)


@pytest.mark.parametrize("name", ["checkpoint", "model", "pictures", "wandb"])
def test_nothing_is_written_through_a_link_to_a_folder(tmp_path: Path, config: Config, name: str) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path / "mine")
    with pytest.raises(FolderError, match=rf"run/{name}: leads elsewhere by a symbolic link"):
        run_trial(config, tmp_path / "run")
    assert not any((tmp_path / "mine").iterdir())


def _read_all(run: Path, name: str) -> None:
    """As the commands do that would read this file of the run."""
    folder = RunFolder(run)
    readers: dict[str, Callable[[], object]] = {
        "config.yaml": folder.read_config,
        "summary.json": folder.read_summary,
        "metrics.jsonl": folder.read_metrics,
        "checkpoint/last.pt": lambda: folder.check_checkpoint(run / name),
        "model/final.safetensors": lambda: evaluate(run),
        "trials.json": lambda: read_table(run / name),
    }
    readers[name]()


@pytest.mark.parametrize(
    "name",
    ["config.yaml", "summary.json", "metrics.jsonl", "checkpoint/last.pt", "model/final.safetensors",
     "trials.json"],
)  # fmt: skip
def test_a_named_pipe_is_no_file_to_wait_for(tmp_path: Path, config: Config, name: str) -> None:
    run = tmp_path / "run"
    run_trial(config, run)
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    with pytest.raises(UserError, match=rf"{Path(name).name}: is (no regular file|missing)"):
        _read_all(run, name)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "name", ["config.yaml", "summary.json", "metrics.jsonl", "checkpoint/last.pt", "trials.json"]
)
def test_a_file_of_holes_takes_no_memory_and_no_time(tmp_path: Path, config: Config, name: str) -> None:
    run = tmp_path / "run"
    run_trial(config, run)
    (run / name).touch()
    os.truncate(run / name, 1 << 40)
    with pytest.raises(UserError, match=rf"{Path(name).name}: (damaged|has 1,099,511,627,776 bytes)"):
        _read_all(run, name)


def test_nothing_is_appended_to_a_pipe_and_no_lock_is_read_from_one(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lock")
    os.mkfifo(tmp_path / "traceback.txt")
    assert not is_held(tmp_path)
    with pytest.raises(DiskError):
        append(tmp_path / "traceback.txt", "x\n")


def test_compressed_members_of_a_checkpoint_are_refused(tmp_path: Path, config: Config) -> None:
    """A few kilobytes would stand for as many bytes as memory holds."""
    stored, packed = io.BytesIO(), io.BytesIO()
    torch.save({"progress": torch.zeros(100_000)}, stored)
    with zipfile.ZipFile(stored) as one, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as other:
        for name in one.namelist():
            other.writestr(name, one.read(name))
    assert len(packed.getvalue()) < 0.1 * len(stored.getvalue())
    run = RunFolder(tmp_path / "run")
    with run.lock():
        run.start(to_plain(config), [], {})
        run.save_checkpoint(packed.getbuffer())
        with pytest.raises(FolderError, match=r"last\.pt: ValueError it is compressed"):
            checkpoint.load(run, run.checkpoints()[0])


class _Theirs:
    def __reduce__(self) -> object:
        return print, ("code",)


def test_a_refused_pickle_comes_without_advice_to_load_it(tmp_path: Path, config: Config) -> None:
    run = RunFolder(tmp_path / "run")
    with run.lock():
        run.start(to_plain(config), [], {})
        checkpoint.save(run, {"progress": _Theirs()})
    with pytest.raises(FolderError, match="only code in it could make") as refused:
        run_trial(config, tmp_path / "run")
    written = (tmp_path / "run/traceback.txt").read_text()
    for text in (str(refused.value), written):
        assert "weights_only" not in text
        assert "can still be loaded" not in text


@pytest.mark.parametrize("status", ['["x"]', '"x"', "null", "{}"])
def test_a_summary_of_no_status_is_damaged(tmp_path: Path, status: str) -> None:
    (tmp_path / "summary.json").write_text(f'{{"status": {status}}}')
    with pytest.raises(FolderError, match=r"summary\.json: damaged"):
        RunFolder(tmp_path).read_summary()


def test_a_passing_error_while_a_seal_is_checked_renames_nothing(
    tmp_path: Path, config: Config, compose_config: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_trial(config, tmp_path / "run")
    before = sorted(path.name for path in (tmp_path / "run/checkpoint").iterdir())
    longer = compose_config(*RUN, "max_steps=2")

    def failing(path: Path) -> str:
        raise OSError(5, os.strerror(5), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "identity_of", failing)
        with pytest.raises(DiskError, match=r"last\.pt: Input/output error"):
            run_trial(longer, tmp_path / "run")
    assert sorted(path.name for path in (tmp_path / "run/checkpoint").iterdir()) == before
    assert run_trial(longer, tmp_path / "run")["steps"] == 2
