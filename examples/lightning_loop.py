"""Use an EchoLoader in Lightning's Trainer: ``python examples/lightning_loop.py``."""

from typing import Any

import lightning
import numpy as np
import torch

from adaecho import EchoLoader


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(8, 2)

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.net(batch["x"]), batch["label"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    generator = np.random.default_rng(0)
    arrays = {
        "x": generator.normal(size=(256, 8)).astype(np.float32),
        "label": generator.integers(2, size=256),
    }
    loader = EchoLoader(arrays, 32, echo="batch", factor=2, shuffle_buffer=64, epochs=1)
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(Classifier(), loader)
    print(f"{trainer.global_step} steps from {loader.fresh_examples} examples read")


if __name__ == "__main__":
    main()
