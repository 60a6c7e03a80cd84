"""Train with DDP and a single checkpoint for all ranks: ``torchrun --nproc-per-node 2 examples/ddp_loop.py``.

If you run the command again, it resumes from ddp_loop.pt.
"""

from pathlib import Path

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from adaecho import EchoLoader

CHECKPOINT = Path("ddp_loop.pt")


def main() -> None:
    # Use "nccl" on GPUs. Call this before you create the loader, which splits the examples among the ranks.
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    generator = np.random.default_rng(0)
    arrays = {
        "x": generator.normal(size=(256, 8)).astype(np.float32),
        "label": generator.integers(2, size=256),
    }
    loader = EchoLoader(  # each rank gets batches of 32 examples
        arrays, 32, echo="batch", factor=2, shuffle_buffer=64, epochs=1, state_of_all_ranks=True
    )
    model = DistributedDataParallel(torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = 0
    if CHECKPOINT.exists():
        state = torch.load(CHECKPOINT)
        model.load_state_dict(state["model"])
        loader.load_state_dict(state["loader"])
        first = state["epoch"] + 1
    for epoch in range(first, first + 2):
        for batch in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(batch["x"]), batch["label"]).backward()
            optimizer.step()
        # All ranks must call the loader's state_dict().
        state = {"model": model.state_dict(), "loader": loader.state_dict(), "epoch": epoch}
        if rank == 0:
            torch.save(state, CHECKPOINT)
    print(f"rank {rank}: {len(loader)} steps an epoch, {loader.fresh_examples} examples, {epoch + 1} epochs")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
