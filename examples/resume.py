"""Stop after any batch, and resume with the same next batches: ``python examples/resume.py``."""

import tempfile
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from adaecho import EchoLoader


def make_loader() -> EchoLoader:
    return EchoLoader(np.arange(1000), 8, echo="batch", factor=1.5, shuffle_buffer=100, num_workers=2, seed=3)


def main() -> None:
    with make_loader() as whole:
        expected = [batch.tolist() for batch in islice(whole, 20)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.pt"
        with make_loader() as first:
            seen = [batch.tolist() for batch in islice(first, 7)]
            # Save the loader's state together with the model and the optimizer. It is the state after batch
            # 7, even if workers have already read ahead.
            torch.save({"loader": first.state_dict()}, path)
        with make_loader() as second:
            second.load_state_dict(torch.load(path, weights_only=True)["loader"])
            seen += [batch.tolist() for batch in islice(second, 13)]
            print(f"{second.fresh_examples} examples read, {second.reread_examples} of them again to resume")
    assert seen == expected
    print("20 batches, the same as without the break")


if __name__ == "__main__":
    main()
