"""Echo examples inside a Grain pipeline, after a MapDataset: ``python examples/grain_pipeline.py``.

``Echoed`` wraps an EchoLoader in an IterDataset. The loader's state is plain text inside Grain's state, so
that Grain's checkpoints (JSON, Orbax) contain it. The example needs ``pip install grain``.
"""

import base64
import io
import json
from itertools import islice
from typing import Any

import grain
import numpy as np
import torch

from adaecho import EchoLoader


class Echoed(grain.IterDataset):
    """An EchoLoader over a MapDataset, as a Grain dataset.

    Args:
        source: the examples. With ``order="sequential"``, the loader keeps the order of the source's own
            ``shuffle``.
        arguments: arguments of the EchoLoader.
    """

    def __init__(self, source: grain.MapDataset, **arguments: Any) -> None:
        super().__init__()
        self._source, self._arguments = source, arguments

    def __iter__(self) -> "EchoedIterator":
        return EchoedIterator(EchoLoader(self._source, **self._arguments))


class EchoedIterator(grain.DatasetIterator):
    """Yield the batches of the loader. Grain gets and sets the loader's state."""

    def __init__(self, loader: EchoLoader) -> None:
        super().__init__()
        self._loader, self._batches = loader, iter(loader)

    def __next__(self) -> Any:
        return next(self._batches)

    def get_state(self) -> dict[str, Any]:
        content = io.BytesIO()
        torch.save(self._loader.state_dict(), content)
        return {"echo": base64.b64encode(content.getvalue()).decode()}

    def set_state(self, state: dict[str, Any]) -> None:
        content = io.BytesIO(base64.b64decode(state["echo"]))
        self._loader.load_state_dict(torch.load(content, weights_only=True))
        self._batches = iter(self._loader)

    def close(self) -> None:
        self._loader.close()
        super().close()


def pipeline() -> Any:
    """Return batches of 20 out of 1,000 examples that are each used three times.

    Further Grain operations may follow the echo, such as the ``map`` here.
    """
    examples = grain.MapDataset.source(np.arange(1000)).map(lambda row: {"x": np.full(3, row), "row": row})
    echoed = Echoed(
        examples, batch_size=20, echo="example_before_augmentation", factor=3, shuffle_buffer=100, epochs=1
    )
    return echoed.map(lambda batch: {"x": batch["x"].numpy() / 1000, "row": batch["row"].tolist()})


def main() -> None:
    whole = [batch["row"] for batch in pipeline()]
    cut = iter(pipeline())
    begun = [batch["row"] for batch in islice(cut, 60)]
    checkpoint = json.dumps(cut.get_state())
    resumed = iter(pipeline())
    resumed.set_state(json.loads(checkpoint))
    rest = [batch["row"] for batch in resumed]
    print(f"{len(whole)} batches of 1000 examples; resumed after 60: {begun + rest == whole}")


if __name__ == "__main__":
    main()
