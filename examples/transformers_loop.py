"""Resume an EchoLoader mid-epoch in Hugging Face's Trainer: ``python examples/transformers_loop.py``."""

import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from adaecho import EchoLoader


class Classifier(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": torch.nn.functional.cross_entropy(self.net(inputs), labels)}


class SavePosition(TrainerCallback):
    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:  # noqa: ARG002
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        position = given["train_dataloader"].state_dict()  # all ranks must call this
        if state.is_world_process_zero:
            torch.save(position, folder / "loader.pt")


class EchoTrainer(Trainer):
    def get_train_dataloader(self) -> Any:
        loader = EchoLoader(
            self.train_dataset, self.args.train_batch_size, epochs=1, echo="batch", factor=2,
            seed=self.args.seed, device=self.args.device, state_of_all_ranks=True,
        )  # fmt: skip
        if self.resume_folder is not None:
            loader.load_state_dict(torch.load(Path(self.resume_folder) / "loader.pt"))
        return loader

    def train(self, resume_from_checkpoint: Any = None, *more: Any, **named: Any) -> Any:
        self.resume_folder = resume_from_checkpoint
        return super().train(resume_from_checkpoint, *more, **named)


def main() -> None:
    dataset = [{"inputs": torch.randn(4), "labels": row % 2} for row in range(64)]
    with tempfile.TemporaryDirectory() as folder:
        given = TrainingArguments(
            folder, per_device_train_batch_size=16, num_train_epochs=2, save_steps=6, use_cpu=True,
            report_to=[], disable_tqdm=True, ignore_data_skip=True,  # the loader resumes instead
        )  # fmt: skip
        for checkpoint in (None, f"{folder}/checkpoint-6"):  # the second run resumes within the first epoch
            trainer = EchoTrainer(Classifier(), given, train_dataset=dataset, callbacks=[SavePosition()])
            trainer.train(checkpoint)
            loader: Any = trainer.callback_handler.train_dataloader
            print(f"{trainer.state.global_step} steps, {loader.fresh_examples} examples read")


if __name__ == "__main__":
    main()
