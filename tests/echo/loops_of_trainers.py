"""Training loops under DDP, Fabric, Accelerate and Lightning, as users write them.

``python -m tests.echo.loops_of_trainers FOLDER NAME=PORT ...`` expects torchrun's variables except port and
rank. It imports the trainers, which takes seconds, and forks the ranks of each trainer in turn. Each rank
writes its results to FOLDER/name/rank.json.
"""

import importlib
import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler, TensorDataset

from adaecho import EchoLoader

PACKAGES = {"ddp": "torch", "fabric": "lightning", "accelerate": "accelerate", "lightning": "lightning"}
Results = dict[str, Any]
ROWS, EPOCHS = 64, 3
SAVED_IN_EPOCH, SAVED_AFTER = 1, 3  # batches of that epoch before the state is saved
dataset = TensorDataset(torch.arange(ROWS * 3.0).reshape(ROWS, 3) / ROWS, torch.arange(ROWS))


def make(**more: Any) -> EchoLoader:
    return EchoLoader(
        dataset, 8, epochs=1, echo="example_before_augmentation", factor=2, shuffle_buffer=16, num_workers=1,
        state_of_all_ranks=True, **more,
    )  # fmt: skip


def parts() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(3, ROWS)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def error_of(function: Any) -> str:
    try:
        function()
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def rest_of(loader: EchoLoader) -> list[list[list[int]]]:
    """The rest of the epoch of the state, and the next epoch."""
    return [[labels.tolist() for _, labels in loader] for _ in range(2)]


def train(loader: EchoLoader, model: Any, backward: Any, save: Callable[[], None], *stepped: Any) -> Results:
    """Train, save a state within an epoch, and return the labels and the lengths of all epochs."""
    seen: list[list[list[int]]] = []
    lengths = []
    for epoch in range(EPOCHS):
        loader.set_epoch(epoch)
        lengths.append(len(loader))
        seen.append([])
        for inputs, labels in loader:
            model.zero_grad()
            backward(cross_entropy(model(inputs), labels))
            for optimizer_or_scheduler in stepped:
                optimizer_or_scheduler.step()
            seen[-1].append(labels.tolist())
            if (epoch, len(seen[-1])) == (SAVED_IN_EPOCH, SAVED_AFTER):
                save()
    weight = model.module.weight.tolist()
    return {"seen": seen, "lengths": lengths, "fresh": loader.fresh_examples, "weight": weight}


def ddp(folder: Path) -> Results:
    torch.distributed.init_process_group("gloo")
    loader, (model, optimizer) = make(), parts()
    model = DistributedDataParallel(model)

    def save() -> None:
        state = {"loader": loader.state_dict()}  # on every rank
        if torch.distributed.get_rank() == 0:
            torch.save(state, folder / "checkpoint.pt")

    results = train(loader, model, torch.Tensor.backward, save, optimizer)
    torch.distributed.barrier()
    resumed, sampler = make(), DistributedSampler(dataset)
    resumed.load_state_dict(torch.load(folder / "checkpoint.pt")["loader"])
    rest = rest_of(resumed)
    loader.set_epoch(1)
    by_sampler = make(sampler=sampler, rank=0, world_size=1)
    return results | {
        "rest": rest,
        "again": [labels.tolist() for _, labels in loader],
        "sampler": error_of(lambda: make(sampler=sampler)),
        "its_set_epoch": error_of(lambda: loader.sampler.set_epoch(1)),  # type: ignore[attr-defined]
        "by_sampler": [labels.tolist() for _, labels in by_sampler],
    }


def fabric(folder: Path) -> Results:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    model, optimizer = fabric.setup(*parts())
    loader = make(device=fabric.device)

    def save() -> None:
        fabric.save(folder / "checkpoint.pt", {"model": model, "loader": loader})

    results = train(loader, model, fabric.backward, save, optimizer)
    resumed = make(device=fabric.device)
    fabric.load(folder / "checkpoint.pt", {"model": model, "loader": resumed})
    return results | {
        "rest": rest_of(resumed),
        "setup_dataloaders": error_of(lambda: fabric.setup_dataloaders(loader)),
    }


def accelerate(folder: Path) -> Results:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    made, (model, optimizer) = make(device=accelerator.device), parts()
    steps = EPOCHS * len(made) * accelerator.num_processes
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=steps)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, made)
    accelerator.register_for_checkpointing(loader)

    saves = partial(accelerator.save_state, folder / "checkpoint")
    results = train(loader, model, accelerator.backward, saves, optimizer, scheduler)
    scheduled = scheduler.scheduler.last_epoch
    accelerator.wait_for_everyone()
    accelerator.load_state(folder / "checkpoint")
    return results | {
        "rest": rest_of(loader),
        "unchanged": loader is made,
        "scheduled": scheduled,
        "skip_first_batches": error_of(lambda: accelerator.skip_first_batches(loader, 2)),
    }


def lightning(folder: Path) -> Results:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(3, ROWS)
            self.seen: dict[int, list[list[int]]] = {}

        def train_dataloader(self) -> EchoLoader:
            self.loader = make()
            return self.loader

        def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
            inputs, labels = batch
            self.seen.setdefault(self.current_epoch, []).append(labels.tolist())
            return cross_entropy(self.linear(inputs), labels)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    def trainer() -> Any:
        every = SAVED_IN_EPOCH * 2 * ROWS // 2 // 8 + SAVED_AFTER
        saves = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=every)
        return lightning.Trainer(
            accelerator="cpu", devices=2, strategy="ddp", max_epochs=EPOCHS, logger=False, callbacks=[saves],
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip

    model, resumed = Model(), Model()
    trainer().fit(model)
    (checkpoint,) = (path for path in folder.glob("*.ckpt") if "=11." in path.name)
    trainer().fit(resumed, ckpt_path=checkpoint, weights_only=False)
    return {
        "seen": list(model.seen.values()),
        "lengths": [len(model.loader)] * EPOCHS,
        "rest": list(resumed.seen.values()),
        "fresh": model.loader.fresh_examples,
        "weight": model.linear.weight.tolist(),
        "resumed_weight": resumed.linear.weight.tolist(),
    }


def _train(name: str, folder: Path, rank: int, port: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": port}
    torch.manual_seed(0)
    early = make()
    results = {"ddp": ddp, "fabric": fabric, "accelerate": accelerate, "lightning": lightning}[name](folder)
    results["early"] = [error_of(use) for use in (early.__iter__, early.__len__, early.state_dict)]
    (folder / f"{rank}.json").write_text(json.dumps(results))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def main() -> None:
    ports = dict(argument.split("=") for argument in sys.argv[2:])
    for module in ("torch._dynamo", *(PACKAGES[name] for name in ports)):
        importlib.import_module(module)
    forks, world_size = multiprocessing.get_context("fork"), int(os.environ["WORLD_SIZE"])
    for name, port in ports.items():
        folder = Path(sys.argv[1]) / name
        folder.mkdir()
        ranks = [forks.Process(target=_train, args=(name, folder, rank, port)) for rank in range(world_size)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()


if __name__ == "__main__":
    main()
