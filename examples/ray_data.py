"""Train twice on each batch that Ray Data preprocesses: ``python examples/ray_data.py``.

If Ray's workers are too slow to keep training busy, training can reuse each batch instead of waiting for the
next one. The workers may run on any machine. Each rank (training process) repeats its batches locally, so
repeats add no network traffic. The example needs ``pip install 'ray[data]'``.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import ray
import torch

from adaecho import EchoLoader

RANKS, ROWS, BATCH, EPOCHS = 2, 640, 32, 2


def decode(rows: dict[str, Any]) -> dict[str, Any]:
    """Decode examples on Ray's workers. This function stands in for expensive work."""
    return {"row": rows["id"], "x": rows["id"] / ROWS}


def fresh_batches(share: Any) -> Iterator[dict[str, torch.Tensor]]:
    """Yield one rank's batches of one epoch, which Ray starts when all ranks are ready."""
    yield from share.iter_torch_batches(batch_size=BATCH)


@ray.remote(num_cpus=0)
class Trainer:
    """The training process of one rank. A machine may have several ranks."""

    def __init__(self, share: Any) -> None:
        self._share = share

    def train(self) -> tuple[int, int, list[int]]:
        """Return the number of steps, the number of fresh examples, and the rows of the last epoch."""
        loader = EchoLoader(
            partial(fresh_batches, self._share), batch_size=None, epochs=1, echo="batch", factor=2,
            rank=0, world_size=1,
        )  # fmt: skip
        steps, rows = 0, []
        with loader:
            for _ in range(EPOCHS):
                rows = []
                for batch in loader:
                    steps, rows = steps + 1, rows + batch["row"].tolist()
            return steps, loader.fresh_examples, rows


def main() -> None:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    dataset = ray.data.range(ROWS).map_batches(decode)
    shares = dataset.streaming_split(RANKS, equal=True)
    results = ray.get([trainer.train.remote() for trainer in map(Trainer.remote, shares)])
    for rank, (steps, fresh, _) in enumerate(results):
        print(f"rank {rank}: {steps} steps from {fresh} fresh examples in {EPOCHS} epochs")
    seen = sorted(row for _, _, rows in results for row in rows)
    assert seen == sorted([*range(ROWS), *range(ROWS)]), "each row twice in a pass, on one rank"
    ray.shutdown()


if __name__ == "__main__":
    main()
