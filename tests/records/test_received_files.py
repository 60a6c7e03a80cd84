"""What stands in place of a run's files, in a folder received from others: links, pipes, bombs."""

import io
import os
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from adaecho import EchoLoader
from adaecho.config.schema import Config, to_plain
from adaecho.echo.state import sealed
from adaecho.errors import DiskError, FolderError, UserError
from adaecho.evaluate import evaluate
from adaecho.figures.committed import read_table
from adaecho.records import checkpoints
from adaecho.records.files import append
from adaecho.records.folder import RunFolder
from adaecho.records.lock import is_held
from adaecho.training import checkpoint, draws
from adaecho.training.optimizer import load_optimizer
from adaecho.training.trial import run_trial
from tests.conftest import Compose

RUN = ("task=digits_mlp", "max_steps=1", "target.value=null", "echo.shuffle_buffer=1")


@pytest.fixture
def config(compose_config: Compose) -> Config:
    return compose_config(*RUN)


FOLDERS = ("checkpoint", "model", "pictures", "wandb")
FILES = ("lock", "config.yaml", "environment.json", "metrics.jsonl", "summary.json", "wandb.json")


INNER = ("attempts.log", "traceback.txt", "checkpoint/last.pt", "model/final.safetensors")


@pytest.mark.parametrize("name", [*FOLDERS, *FILES, *INNER])
def test_nothing_is_read_or_written_through_a_link(tmp_path: Path, config: Config, name: str) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "run" / name).parent.mkdir(parents=True)
    (tmp_path / "run" / name).symlink_to(tmp_path / "mine" / ("" if name in FOLDERS else "absent"))
    with pytest.raises(FolderError, match=rf"run/{name}: leads elsewhere by a symbolic link"):
        run_trial(config, tmp_path / "run")
    assert not any((tmp_path / "mine").iterdir())


# How the commands read a file that would read it.
READERS: dict[str, Callable[[Path], object]] = {
    "config.yaml": lambda run: RunFolder(run).read_config(),
    "summary.json": lambda run: RunFolder(run).read_summary(),
    "metrics.jsonl": lambda run: RunFolder(run).read_metrics(),
    "checkpoint/last.pt": lambda run: RunFolder(run).check_checkpoint(run / "checkpoint/last.pt"),
    "trials.json": lambda run: read_table(run / "trials.json"),
    "model/final.safetensors": evaluate,
}


def _pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def _holes(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a pipe": (_pipe, "is (no regular file|missing)"),
    "a terabyte of holes": (_holes, "(damaged|has 1,099,511,627,776 bytes)"),
}


IN_PLACE = [(name, fault) for name in READERS for fault in FAULTS]
IN_PLACE.remove(("model/final.safetensors", "a terabyte of holes"))  # weights may be as large as a disk


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("name", "fault"), IN_PLACE)
def test_what_stands_in_place_of_a_file_takes_no_memory_and_no_time(
    config: Config, name: str, fault: str
) -> None:
    run, (put, says) = Path("run"), FAULTS[fault]
    run_trial(config, run)
    put(run / name)
    with pytest.raises(UserError, match=f"{Path(name).name}: {says}"):
        READERS[name](run)


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


def test_a_passing_error_while_a_seal_is_checked_renames_nothing(
    tmp_path: Path, config: Config, compose_config: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    def names() -> list[str]:
        return sorted(path.name for path in (tmp_path / "run/checkpoint").iterdir())

    def failing(path: Path) -> str:
        raise OSError(5, os.strerror(5), str(path))

    run_trial(config, tmp_path / "run")
    before, longer = names(), compose_config(*RUN, "max_steps=2")
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "identity_of", failing)
        with pytest.raises(DiskError, match=r"last\.pt: Input/output error"):
            run_trial(longer, tmp_path / "run")
    assert names() == before
    assert run_trial(longer, tmp_path / "run")["steps"] == 2


def _optimizer(**settings: Any) -> tuple[torch.optim.Optimizer, list[torch.Tensor]]:
    """Two groups, after a step."""
    weights = [torch.ones(3, 2, requires_grad=True), torch.ones(4, requires_grad=True)]
    groups = [{"params": [one]} for one in weights]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, **settings)
    sum(one.square().sum() for one in weights).backward()
    optimizer.step()
    return optimizer, weights


@pytest.mark.parametrize(
    "forged", [torch.ones(1), torch.ones(()), torch.ones(3, 3), torch.ones(3, 2, dtype=torch.int64)]
)
def test_the_optimizers_numbers_are_those_of_its_parameters(forged: torch.Tensor) -> None:
    """A fused kernel would go on beyond the end of what is shorter."""
    optimizer, weights = _optimizer(fused=True)
    state = optimizer.state_dict()
    state["state"][0]["momentum_buffer"] = forged
    with pytest.raises(ValueError, match=r"its optimizer has \[.* of a parameter of \[3, 2\]"):
        load_optimizer(optimizer, state)
    state["state"][0]["momentum_buffer"] = torch.ones(1).expand(3, 2)  # of one number
    load_optimizer(optimizer, state)
    assert optimizer.state[weights[0]]["momentum_buffer"].stride() == (2, 1)


def test_the_optimizers_settings_stay_those_of_the_config() -> None:
    optimizer, weights = _optimizer()
    other, _ = _optimizer(weight_decay=1.0, maximize=True, fused=True)
    state = other.state_dict()
    state["param_groups"][0]["params"], state["param_groups"][1]["params"] = [1], [0]
    before = [{**group} for group in optimizer.param_groups]
    load_optimizer(optimizer, state)
    assert [{**group} for group in optimizer.param_groups] == before
    assert optimizer.state[weights[1]]["momentum_buffer"].shape == (4,)
    del state["param_groups"][1]
    with pytest.raises(ValueError, match="other groups of parameters"):
        load_optimizer(optimizer, state)


@pytest.mark.parametrize("position", [-1, 625, 10**8])
def test_numpys_generator_stands_within_its_numbers(position: int) -> None:
    device = torch.device("cpu")
    state = draws.state(device)
    name, key, _, *more = state["numpy"]
    of_words = {"bit_generator": name, "state": {"key": key, "pos": position}, "has_gauss": 0, "gauss": 0.0}
    of_words |= dict.fromkeys(range(5), 0)
    for forged in ((name, key, position, *more), [name, key, position, *more], (name, key[:9], 0, *more)):
        with pytest.raises(ValueError, match="NumPy's generator stands nowhere"):
            draws.restore({**state, "numpy": forged}, device)
    with pytest.raises((ValueError, TypeError)):
        draws.restore({**state, "numpy": of_words}, device)
    draws.restore(state, device)


def test_torchs_generator_stands_within_its_numbers() -> None:
    device = torch.device("cpu")
    torch.manual_seed(3)
    for _ in range(700):  # each place
        state = draws.state(device)
        draws.restore(state, device)
        torch.rand(1)
    for left, position in ((600, 600), (624, 624 - 2**32), (0, 3), (-1, 3)):
        forged = state["cpu"].clone()
        forged[8:12] = torch.tensor([left], dtype=torch.int32).view(torch.uint8)
        forged[16:24] = torch.tensor([position]).view(torch.uint8)
        with pytest.raises(ValueError, match="torch's generator stands nowhere"):
            draws.restore({**state, "cpu": forged}, device)


@pytest.mark.parametrize("kind", [OrderedDict, Counter])
def test_a_checkpoint_does_not_say_how_weights_are_loaded(
    config: Config, tmp_path: Path, kind: type[dict[str, Any]]
) -> None:
    """The optimizer would hold the parameters that stood there before, and training stop in silence."""
    run_trial(config, tmp_path)
    run = RunFolder(tmp_path)
    state = checkpoint.load(run, run.checkpoints()[0])
    assert {"version": 1} in state["model"]._metadata.values()
    metadata = state["model"]._metadata
    for more in metadata.values():
        more["assign_to_params_buffers"] = True
    state["model"] = kind(state["model"])
    state["model"]._metadata = metadata
    with run.lock():
        run.start(to_plain(config))
        checkpoint.save(run, state)
    for loaded in (checkpoint.load(run, run.checkpoints()[0]), checkpoint.unpacked(_bytes(state))):
        assert not any("assign_to_params_buffers" in more for more in loaded["model"]._metadata.values())


def _bytes(state: dict[str, Any]) -> bytes:
    whole = io.BytesIO()
    torch.save(state, whole)
    return whole.getvalue()


@pytest.mark.parametrize("value", [2**62, 0, -1.0, float("nan")])
def test_a_factor_that_no_loader_has_is_refused(value: float) -> None:
    loader = EchoLoader(torch.arange(9), 2, echo="batch", factor=2)
    next(iter(loader))
    state = loader.state_dict()
    for history in ([[0, value]], [[0, 2.0], [3, value]], [[3, 2.0]]):
        state["factors"]["batches"] = history
        with pytest.raises(ValueError, match=r"load_state_dict: its factors are .* the state is damaged"):
            loader.load_state_dict(sealed(state))
