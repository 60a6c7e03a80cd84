"""Augmentations that draw from the global generators; worker processes import them from here."""

import os
import random
from typing import Any

import numpy as np
import torch


def draw(example: dict[str, Any]) -> dict[str, Any]:
    drawn = [float(torch.rand(())), random.random(), np.random.rand()]
    return {"label": example["label"], "drawn": torch.tensor(drawn, dtype=torch.float64), "pid": os.getpid()}


def draw_again(example: dict[str, Any]) -> dict[str, Any]:
    return {**example, "drawn again": draw(example)["drawn"]}


def fail(example: dict[str, Any]) -> dict[str, Any]:
    if example["label"] == 5:
        raise KeyError("no five")
    return example
