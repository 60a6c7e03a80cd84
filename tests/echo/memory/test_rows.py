"""Rows of structured arrays are views: what augment writes into one stays out of the source."""

import numpy as np

from adaecho import EchoLoader


def test_a_row_of_a_structured_array_is_the_sources() -> None:
    rows = np.zeros(20, np.dtype([("x", "f4", (3,)), ("y", "i8")]))
    rows["y"] = np.arange(20)
    rows["x"] = np.arange(20)[:, None]
    before = rows.copy()

    def augment(row: np.void, _: np.random.Generator) -> dict[str, object]:
        x = row["x"]
        x += 100
        return {"x": x, "y": int(row["y"])}

    echo = {"echo": "example_before_augmentation", "factor": 2, "shuffle_buffer": 8}
    loader = EchoLoader(rows, 5, augment=augment, epochs=1, **echo)  # type: ignore[arg-type]
    found = {float(value) for _ in range(2) for batch in loader for value in (batch["x"][:, 0] - batch["y"])}
    assert found == {100.0}
    assert (rows == before).all()
