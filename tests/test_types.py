"""mypy --strict accepts programs that use the public API correctly and rejects wrong ones."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)

USER = """
from collections.abc import Iterator

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from adaecho import AdaScale, EchoLoader, TarShards


class Rows(Dataset[tuple[torch.Tensor, int]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        return torch.full((3,), float(row)), row


def augment(example: tuple[torch.Tensor, int], rng: np.random.Generator) -> tuple[torch.Tensor, int]:
    return example[0] + rng.random(), example[1]


def stream() -> Iterator[dict[str, int]]:
    yield from ({"x": row} for row in range(10))


loader = EchoLoader(
    Rows(), batch_size=8, epochs=1, echo="example_before_augmentation", factor=1.5, augment=augment
)
model = torch.nn.Linear(3, 64)
optimizer = AdaScale(torch.optim.SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3)
for inputs, labels in loader:
    optimizer.zero_grad()
    for part in range(2):
        loss = torch.nn.functional.cross_entropy(model(inputs[part::2]), labels[part::2]) / 2
        loss.backward()
    optimizer.step()
state: dict[str, object] = {"loader": loader.state_dict(), "optimizer": optimizer.state_dict()}
batches: int = len(loader)
read: int = loader.fresh_examples
ratio: float | None = loader.R
gain: float = optimizer.gain()
tau: float = optimizer.scale_invariant_steps
dataset = TensorDataset(torch.zeros(8, 1))
around = EchoLoader(DataLoader(dataset, batch_size=4), batch_size=None, echo="batch", factor=2, epochs=1)
streamed = EchoLoader(stream, batch_size=2, shuffle_buffer=4, factor="auto", echo="batch")
shards = TarShards("shard-{000..003}.tar", open_shards=2)
with EchoLoader({"x": np.arange(8)}, 4) as opened:
    batch = next(iter(opened))
"""
WRONG = """
from adaecho import AdaScale, EchoLoader

EchoLoader([1, 2], batch_size="4")
AdaScale([])
"""


def strict(*places: Path) -> list[str]:
    # The project's settings share the cache with `make lint`.
    command = [sys.executable, "-m", "mypy", "--no-error-summary", *map(str, places)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert not done.stderr, done.stderr
    # torch has no types for Tensor.backward.
    return [line for line in done.stdout.splitlines() if 'untyped function "backward"' not in line]


def test_programs_pass_mypy_strict_and_wrong_ones_do_not(tmp_path: Path) -> None:
    programs = {"user": USER, "wrong": WRONG}
    programs |= {f"readme{number}": code for number, code in enumerate(README) if "import cv2" not in code}
    for name, code in programs.items():
        (tmp_path / f"{name}.py").write_text(code)
    # Lightning's types take long to check, Grain has none, and Ray may be absent.
    examples = [
        path
        for path in (ROOT / "examples").glob("*.py")
        if not re.search(r"^import (grain|lightning|ray)\b", path.read_text(), flags=re.MULTILINE)
    ]
    errors = strict(*examples, *sorted(tmp_path.glob("*.py")))
    mistakes = [line for line in errors if "/wrong.py:" in line and ": error:" in line]
    assert [line.rpartition("  ")[2] for line in mistakes] == ["[arg-type]", "[arg-type]"]
    assert [line for line in errors if "/wrong.py:" not in line] == []
