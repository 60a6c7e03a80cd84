"""Is this the same run? What decides a run's trajectory, a name for it, and differences for people to read.

Run folders, searches and their designs all ask here.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from adaecho.config.tasks import added_options
from adaecho.masking import masked

_ABSENT = object()

# Keys that can't change what a run computes up to a given step: they may differ when a run is resumed.
# Budgets are here too: a larger one continues the run.
COUNTED_BUDGETS = ("max_steps", "max_fresh_examples")  # these can only grow: see ``changes``
BUDGETS = (*COUNTED_BUDGETS, "max_train_time_s")
_NOT_IDENTITY = (
    "tracking", "callbacks", "search", "fresh", "checkpoint_every_s", "rank_timeout_s", *BUDGETS,
)  # fmt: skip
# Below a group: what only decides how fast or in how much memory the same batches are made.
_NOT_IDENTITY_IN = {
    "data": ("num_workers", "processes", "prefetch", "restore", "allow_changed"),
    "echo": ("place",),
}
# Allowances, which an error may advise to raise: they can't change what a run computes before they are used
# up. In the identity at one value, so that folders keep their names.
_ALLOWANCES = {"data": {"max_bad_examples": 0}}
# Keys that came after the first records, with the value that means what runs did before: at that value they
# are no part of the identity, so that folders keep their names and searches their points.
_ADDED_KEYS = {"compile": "off"}
_ADDED: dict[str, dict[str, Any]] = {
    "adascale": {"rule": "gain"},
    "data": {"order": "permutation"},
    "echo": {"split": False},
    "optimizer": {
        "name": "sgd",
        "beta1": 0.9,
        "beta2": 0.999,
        "epsilon": 1e-8,
        "decay_norms_and_biases": True,
        "clip_norm": None,
        "fused": False,
        "zero_redundancy": False,
        "ema_decay": None,
    },
    "schedule": {
        "decay_epochs": None,
        "warmup_epochs": None,
        "first_drop_steps": None,
        "first_drop_epochs": None,
        "drop_gap_steps": None,
        "drop_gap_epochs": None,
        "drop_factor": 10.0,
        "counts": "steps",
    },
    "evaluate": {"max_examples": None, "loss_by_echo_index": False},
    "target": {"in_a_row": 1, "chance": None, "chance_share": 0.5},
}


def identity(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a plain config that decides a run's trajectory; resuming compares it."""
    kept = {
        key: value
        for key, value in config.items()
        if key not in _NOT_IDENTITY and (key not in _ADDED_KEYS or value != _ADDED_KEYS[key])
    }
    for group in kept.keys() & {"task", *_NOT_IDENTITY_IN, *_ADDED}:
        dropped = _NOT_IDENTITY_IN.get(group, ())
        added = added_options(config["task"].get("name")) if group == "task" else _ADDED.get(group, {})
        allowances = _ALLOWANCES.get(group, {})
        kept[group] = {
            key: allowances.get(key, value)
            for key, value in config[group].items()
            if key not in dropped and (key not in added or value != added[key])
        }
    shown: dict[str, Any] = masked(kept)  # a url signed anew names the same data
    return shown


def run_id(config: dict[str, Any]) -> str:
    """Ten hex digits that name a run by its identity."""
    canonical = json.dumps(identity(config), sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:10]


def changes(recorded: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Why a config is not that of a recorded run, as lines; budgets may grow. Empty where it is."""
    return differences(identity(recorded), identity(now)) + smaller_budgets(recorded, now, COUNTED_BUDGETS)


def differences(recorded: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """One line per key whose value differs, nested keys dotted: ``echo.factor: 2 in the folder, 4 now``."""
    old, new = dict(flat(recorded)), dict(flat(now))
    return [
        f"{key}: {_show(old.get(key, _ABSENT))} in the folder, {_show(new.get(key, _ABSENT))} now"
        for key in [*old, *(key for key in new if key not in old)]
        if old.get(key, _ABSENT) != new.get(key, _ABSENT)
    ]


def smaller_budgets(recorded: dict[str, Any], now: dict[str, Any], keys: Sequence[str]) -> list[str]:
    """One line per budget that is below the recorded one; null is no limit."""
    pairs = [(key, recorded.get(key), now.get(key)) for key in keys]
    return [
        f"{key}: {_show(old)} in the folder, {_show(new)} now (a budget can only grow)"
        for key, old, new in pairs
        if new is not None and (old is None or new < old)
    ]


def flat(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Dotted keys and their values."""
    items: list[tuple[str, Any]] = []
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            items += flat(value, f"{prefix}{key}.")
        else:
            items.append((f"{prefix}{key}", value))
    return items


def _show(value: Any) -> str:
    return "absent" if value is _ABSENT else "null" if value is None else str(value)
