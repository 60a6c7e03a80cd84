"""Train twice on each example in a plain training loop: ``python examples/plain_loop.py``."""

import numpy as np
import torch

from adaecho import EchoLoader


def jitter(example: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Add noise to an example. EchoLoader seeds ``rng`` from the example and the repeat."""
    noise = rng.normal(0, 0.1, example["x"].shape)
    return {**example, "x": (example["x"] + noise).astype(np.float32)}


def main() -> None:
    generator = np.random.default_rng(0)
    labels = generator.integers(2, size=512)
    arrays = {
        "x": (generator.normal(size=(512, 8)) + 2 * labels[:, None]).astype(np.float32),
        "label": labels,
    }
    model = torch.nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = EchoLoader(
        arrays, 32, echo="example_before_augmentation", factor=2, shuffle_buffer=128, augment=jitter, epochs=1
    )
    for epoch in range(3):
        for batch in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(batch["x"]), batch["label"])
            loss.backward()
            optimizer.step()
        print(f"pass {epoch}: {loader.fresh_examples} examples read, loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
