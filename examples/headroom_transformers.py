"""Measure whether Hugging Face's Trainer waits for data: ``python examples/headroom_transformers.py``."""

import tempfile
import time
from typing import Any

import torch
import transformers

from adaecho import headroom


class Headroom(transformers.TrainerCallback):
    """A callback that prints how long the training steps waited for their batches."""

    def on_train_begin(self, *_: Any, **given: Any) -> None:
        self.seen = headroom.Watch(given["train_dataloader"])

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.seen.begin_step()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seen.end_step()

    def _resume(self, *_: Any, **__: Any) -> None:
        self.seen.resume()

    on_log = on_evaluate = on_save = _resume  # time spent in these is not a wait for data

    def on_train_end(self, *_: Any, **__: Any) -> None:
        print(self.seen.report())


class SlowRows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 256

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        time.sleep(0.002)
        return {"x": torch.randn(8), "labels": torch.tensor(row % 2)}


class Classifier(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        output = self.net(x)
        return {"loss": torch.nn.functional.cross_entropy(output, labels), "logits": output}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        given = transformers.TrainingArguments(
            folder, per_device_train_batch_size=16, num_train_epochs=2, use_cpu=True, report_to=[],
            logging_steps=5, save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = transformers.Trainer(Classifier(), given, train_dataset=SlowRows(), callbacks=[Headroom()])
        trainer.train()


if __name__ == "__main__":
    main()
