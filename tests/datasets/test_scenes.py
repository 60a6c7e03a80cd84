"""Scenes: fixed by the seed, with a box around the ink of each digit."""

import hashlib
from itertools import combinations

import numpy as np

from adaecho.datasets.scenes import BRIGHTEST, SIDE, make_scenes

GLYPHS = np.zeros((10, 8, 8), np.uint8)
for _digit in range(10):
    GLYPHS[_digit, 1:7, 2:6] = BRIGHTEST
DIGITS = np.arange(10)


def test_scenes_are_the_same_for_any_number_and_differ_by_seed() -> None:
    few, many = make_scenes(GLYPHS, DIGITS, 3, seed=0), make_scenes(GLYPHS, DIGITS, 9, seed=0)
    for row in range(3):
        np.testing.assert_array_equal(few[row]["image"], many[row]["image"])
        np.testing.assert_array_equal(few[row]["boxes"], many[row]["boxes"])
    assert len({hashlib.sha256(many[row]["image"].tobytes()).digest() for row in range(9)}) == 9
    other = make_scenes(GLYPHS, DIGITS, 1, seed=1)
    assert (other[0]["image"] != few[0]["image"]).any()


def test_boxes_are_around_bright_ink_within_the_canvas_and_do_not_overlap() -> None:
    scenes = make_scenes(GLYPHS, DIGITS, 50, seed=0)
    numbers = set()
    for row in range(50):
        image, boxes, labels = (scenes[row][name] for name in ("image", "boxes", "labels"))
        numbers.add(len(labels))
        assert ((labels >= 1) & (labels <= 10)).all()
        assert boxes.min() >= 0
        assert boxes.max() <= SIDE
        ground = np.median(image.reshape(-1, 3), axis=0).max()
        for x1, y1, x2, y2 in boxes.astype(int):
            assert image[y1:y2, x1:x2].mean() > ground + 20
        for one, other in combinations(boxes, 2):
            assert (np.minimum(one[2:], other[2:]) <= np.maximum(one[:2], other[:2])).any()
    assert numbers == {1, 2, 3, 4}
