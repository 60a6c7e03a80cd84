"""Lightning around an EchoLoader: what it takes ahead of the step when it saves, what it leaves undone."""

import gc
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from adaecho import EchoLoader
from tests.echo import others
from tests.echo.others import plain
from tests.echo.sources import Stream

# Of its own use of torch, and of what it would rather have.
pytestmark = pytest.mark.filterwarnings("ignore::Warning:lightning", "ignore:.*treespec:FutureWarning")
ROWS = 40
Make = Callable[[], Any]


def lightning() -> Any:
    """The library; to import it takes seconds, which only who runs these tests waits for."""
    library = pytest.importorskip("lightning", reason="trains the loop: pip install '.[trainers]'")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    return library


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    """A trainer and its loops refer to one another: later tests would find workers of a DataLoader."""
    yield
    gc.collect()


def batches() -> Iterator[torch.Tensor]:
    yield from torch.arange(ROWS).split(4)


ECHOED: dict[str, Any] = {"epochs": 1, "echo": "batch", "factor": 2}
LOADERS: dict[str, Make] = {
    "whole batches, factor 1.5": lambda: EchoLoader(batches, None, **{**ECHOED, "factor": 1.5}),
    "whole batches shuffled": lambda: EchoLoader(
        batches, None, batch_shuffle_buffer=4, num_workers=1, **ECHOED
    ),
    "examples": lambda: EchoLoader(
        Stream(ROWS),
        4,
        epochs=1,
        echo="example_before_augmentation",
        factor=2,
        shuffle_buffer=9,
        num_workers=2,
    ),
    "endless": lambda: EchoLoader(
        np.arange(ROWS), 4, echo="example_after_augmentation", factor=1.5, shuffle_buffer=9
    ),
    # Not of "max_size_cycle": after a resume that no longer knows which of them had ended once.
    "several": lambda: lightning().pytorch.utilities.CombinedLoader(
        {"first": EchoLoader(batches, None, **ECHOED), "second": EchoLoader(np.arange(ROWS), 4, **ECHOED)},
        "min_size",
    ),
}


def fit(
    make: Make, folder: Path | None = None, checkpoint: Path | None = None, *, validates: bool = False,
    **of_trainer: Any,
) -> list[Any]:  # fmt: skip
    """What the steps saw. A checkpoint of each is left in the folder, if one is given."""
    library = lightning()
    seen: list[Any] = []

    class Model(library.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(1, 1)

        def training_step(self, batch: Any) -> torch.Tensor:
            seen.append(plain(batch))
            return self.linear(torch.ones(1, 1)).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def train_dataloader(self) -> Any:
            return make()

        if validates:

            def validation_step(self, batch: Any) -> None: ...

            def val_dataloader(self) -> Any:
                return [torch.zeros(1)]

    class Save(library.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if folder is not None:
                trainer.save_checkpoint(folder / f"{trainer.global_step}.ckpt")

        def on_validation_end(self, trainer: Any, *_: Any) -> None:
            if folder is not None and not trainer.sanity_checking:
                trainer.save_checkpoint(folder / f"{trainer.global_step}-validated.ckpt")

        def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:  # when ModelCheckpoint does by default
            if folder is not None:
                trainer.save_checkpoint(folder / f"{trainer.global_step}-end.ckpt")

    of_trainer = of_trainer or {
        "max_epochs": 2 if make is not LOADERS["endless"] else -1,
        "max_steps": 25 if make is LOADERS["endless"] else -1,
    }
    trainer = library.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[Save()], **of_trainer,
    )  # fmt: skip
    trainer.fit(Model(), ckpt_path=checkpoint, weights_only=False)
    return seen


def assert_each_goes_on(make: Make, folder: Path, seen: list[Any], *steps: int) -> None:
    for step in steps:
        assert fit(make, checkpoint=folder / f"{step}.ckpt") == seen[step:], step


@pytest.mark.parametrize("name", LOADERS)
def test_a_resume_goes_on_with_the_batch_that_was_taken_ahead(name: str, tmp_path: Path) -> None:
    make = LOADERS[name]
    seen = fit(make, tmp_path)
    half = len(seen) // 2
    assert_each_goes_on(make, tmp_path, seen, 1, 6, half - 1, half, len(seen) - 1)


UNTIL: dict[str, dict[str, Any]] = {
    "epochs": {"max_epochs": 3},
    "steps": {"max_epochs": -1, "max_steps": 50},
    "a part of each epoch": {"max_epochs": 3, "limit_train_batches": 7},
    "steps, a part of each epoch": {"max_epochs": -1, "max_steps": 19, "limit_train_batches": 7},
}


@pytest.mark.parametrize("validates", [False, True])
@pytest.mark.parametrize(
    ("name", "until"),
    [(name, until) for name in ("with a length", "whole batches, factor 1.5", "endless") for until in UNTIL
     if (name, until) != ("endless", "epochs")],
)  # fmt: skip
def test_a_resume_at_the_end_of_an_epoch_goes_on_with_the_next(
    name: str, until: str, validates: bool, tmp_path: Path
) -> None:
    make = LOADERS.get(name, lambda: EchoLoader(np.arange(ROWS), 4, **ECHOED))
    seen = fit(make, tmp_path, validates=validates, **UNTIL[until])
    saved = {path: int(path.stem.split("-")[0]) for path in tmp_path.glob("*-*.ckpt")}
    ends = set(saved.values())
    assert len(ends) > (until != "steps" or name != "endless")
    for path, step in {**saved, **{tmp_path / f"{end}.ckpt": end for end in ends}}.items():
        assert fit(make, checkpoint=path, validates=validates, **UNTIL[until]) == seen[step:], path.name


def test_a_state_is_asked_for_in_between_too(tmp_path: Path) -> None:
    """A state of the position itself forgets nothing that Lightning's, of a batch before, still needs."""
    asked = []
    save_of_lightning = EchoLoader.state_dict

    def twice(loader: EchoLoader) -> Any:
        asked.append(loader._pipeline.state(loader._position)["next_index"])
        asked.append(loader.fresh_examples_in_buffer)
        return save_of_lightning(loader)

    make = LOADERS["examples"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EchoLoader, "state_dict", twice)
        seen = fit(make, tmp_path)
    assert asked
    assert_each_goes_on(make, tmp_path, seen, 3, 14)


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore:'set_vital'")
@pytest.mark.parametrize("name", others.LOADERS)
def test_lightning_around_another_loader(name: str, tmp_path: Path) -> None:
    def make() -> EchoLoader:
        source = others.LOADERS[name](tmp_path, others.SIZE)
        return EchoLoader(source, None, epochs=1, echo="batch", factor=1.5)

    torch.manual_seed(1)
    seen = fit(make, tmp_path)
    torch.manual_seed(2)
    if name in others.REFUSED:
        with pytest.raises(ValueError, match=others.REMEDY):
            fit(make, checkpoint=tmp_path / "3.ckpt")
        return
    assert_each_goes_on(make, tmp_path, seen, 3, len(seen) - 3)
