"""Measure whether Lightning's Trainer waits for data: ``python examples/headroom_lightning.py``."""

import time
from typing import Any

import lightning
import torch

from adaecho import headroom


class Headroom(lightning.Callback):
    """A callback that prints how long the training steps waited for their batches."""

    def on_train_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        self.seen = headroom.Watch(trainer.train_dataloader)

    def on_train_batch_start(self, *_: Any) -> None:
        self.seen.begin_step()

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.end_step()

    def on_validation_end(self, *_: Any) -> None:
        if hasattr(self, "seen"):  # the sanity check runs before on_train_start
            self.seen.resume()

    def on_train_end(self, *_: Any) -> None:
        print(self.seen.report())


class SlowRows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 256

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        time.sleep(0.002)
        return torch.randn(8), row % 2


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(8, 2)

    def training_step(self, batch: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        callbacks=[Headroom()],
    )  # fmt: skip
    trainer.fit(Classifier(), torch.utils.data.DataLoader(SlowRows(), batch_size=16))


if __name__ == "__main__":
    main()
