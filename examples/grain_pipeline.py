"""Use each example several times in a Grain pipeline: ``python examples/grain_pipeline.py``.

``Echoed`` wraps an EchoLoader, which repeats examples, as a Grain dataset. The state of the EchoLoader is a
string in Grain's state, so Grain can save it in JSON or Orbax checkpoints. The example needs ``pip install
grain``.
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
    """A Grain dataset that repeats the examples of a MapDataset with an EchoLoader.

    The arguments are those of ``EchoLoader``. If Grain has already shuffled the examples, pass
    ``order="sequential"``.
    """

    def __init__(self, source: grain.MapDataset, **arguments: Any) -> None:
        super().__init__()
        self._source, self._arguments = source, arguments

    def __iter__(self) -> "EchoedIterator":
        return EchoedIterator(EchoLoader(self._source, **self._arguments))


class EchoedIterator(grain.DatasetIterator):
    """An iterator over the batches of an EchoLoader, whose state Grain can save and restore."""

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
    """Return a pipeline that uses each of 1,000 examples three times, in batches of 20."""
    examples = grain.MapDataset.source(np.arange(1000)).map(lambda row: {"x": np.full(3, row), "row": row})
    echoed = Echoed(
        examples, batch_size=20, echo="example_before_augmentation", factor=3, shuffle_buffer=100, epochs=1
    )
    # Further Grain operations may follow the repetition.
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
