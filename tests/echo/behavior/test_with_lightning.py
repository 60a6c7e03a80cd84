"""EchoLoader in the training loop of Lightning, which prefetches one batch."""

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

# Lightning's own deprecations and recommendations
pytestmark = pytest.mark.filterwarnings("ignore::Warning:lightning", "ignore:.*treespec:FutureWarning")
ROWS = 40
Make = Callable[[], Any]


def lightning() -> Any:
    """Import Lightning, which takes seconds, only in these tests."""
    library = pytest.importorskip("lightning", reason="trains the loop: pip install '.[trainers]'")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    return library


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    """Collect reference cycles of trainers, which would keep workers of a DataLoader alive in later tests."""
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
    # Not "max_size_cycle": after a resume, Lightning does not know which loaders had ended once
    "several": lambda: lightning().pytorch.utilities.CombinedLoader(
        {"first": EchoLoader(batches, None, **ECHOED), "second": EchoLoader(np.arange(ROWS), 4, **ECHOED)},
        "min_size",
    ),
}


def fit(
    make: Make, folder: Path | None = None, checkpoint: Path | None = None, *, validates: bool = False,
    **of_trainer: Any,
) -> list[Any]:  # fmt: skip
    """Train and return the batches of all steps. Saves a checkpoint after each step if there is a folder."""
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

        def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:  # when ModelCheckpoint saves by default
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


def assert_exact_resumes(make: Make, folder: Path, seen: list[Any], *steps: int) -> None:
    for step in steps:
        assert fit(make, checkpoint=folder / f"{step}.ckpt") == seen[step:], step


@pytest.mark.parametrize("name", LOADERS)
def test_a_resume_includes_the_batch_that_lightning_prefetched(name: str, tmp_path: Path) -> None:
    make = LOADERS[name]
    seen = fit(make, tmp_path)
    half = len(seen) // 2
    assert_exact_resumes(make, tmp_path, seen, 1, 6, half - 1, half, len(seen) - 1)


UNTIL: dict[str, dict[str, Any]] = {
    "epochs": {"max_epochs": 3},
    "steps": {"max_epochs": -1, "max_steps": 50},
    "part of each epoch": {"max_epochs": 3, "limit_train_batches": 7},
}


@pytest.mark.parametrize(
    ("name", "until", "validates"),
    [("known length", "epochs", True), ("known length", "part of each epoch", False),
     ("whole batches, factor 1.5", "epochs", False), ("whole batches, factor 1.5", "steps", True),
     ("endless", "part of each epoch", True), ("endless", "steps", False)],
)  # fmt: skip
def test_a_resume_at_the_end_of_an_epoch_begins_the_next(
    name: str, until: str, validates: bool, tmp_path: Path
) -> None:
    make = LOADERS.get(name, lambda: EchoLoader(np.arange(ROWS), 4, **ECHOED))
    seen = fit(make, tmp_path, validates=validates, **UNTIL[until])
    saved = {path: int(path.stem.split("-")[0]) for path in tmp_path.glob("*-*.ckpt")}
    ends = set(saved.values())
    assert len(ends) > (until != "steps" or name != "endless")
    for path, step in {**saved, **{tmp_path / f"{end}.ckpt": end for end in ends}}.items():
        assert fit(make, checkpoint=path, validates=validates, **UNTIL[until]) == seen[step:], path.name


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore:'set_vital'")
@pytest.mark.parametrize("name", ["DataLoader", "StatefulDataLoader", "Grain", "WebDataset, shuffled"])
def test_lightning_with_loaders_of_other_libraries(name: str, tmp_path: Path) -> None:
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
    assert_exact_resumes(make, tmp_path, seen, 3, len(seen) - 3)
