"""Identity of a run: the part of a config that decides its results, a name for it, and differences."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from adaecho.config.tasks import added_options
from adaecho.errors import redact_urls

_ABSENT = object()

COUNTED_BUDGETS = ("max_steps", "max_fresh_examples")  # a resumed run may only raise them
BUDGETS = (*COUNTED_BUDGETS, "max_train_time_s")
# Keys that do not change what a run computes up to a given step. They may differ when a run is resumed.
_NOT_IDENTITY = {
    *BUDGETS, "tracking", "callbacks", "search", "fresh", "checkpoint_every_s", "rank_timeout_s",
    "data.num_workers", "data.processes", "data.prefetch", "data.allow_changed", "echo.place",
}  # fmt: skip
# Keys added after the first records, with the value that keeps the earlier behaviour. At that value they are
# not part of the identity, so that run folders keep their names and searches their points.
_ADDED = {
    "compile": "off", "adascale.rule": "gain", "data.order": "permutation", "echo.split": False,
    "optimizer.name": "sgd", "optimizer.beta1": 0.9, "optimizer.beta2": 0.999, "optimizer.epsilon": 1e-8,
    "optimizer.decay_norms_and_biases": True, "optimizer.clip_norm": None, "optimizer.fused": False,
    "optimizer.zero_redundancy": False, "optimizer.ema_decay": None, "schedule.decay_epochs": None,
    "schedule.warmup_epochs": None, "schedule.first_drop_steps": None, "schedule.first_drop_epochs": None,
    "schedule.drop_gap_steps": None, "schedule.drop_gap_epochs": None,
    "schedule.drop_factor": 10.0, "schedule.counts": "steps", "evaluate.max_examples": None,
    "target.in_a_row": 1, "target.chance": None, "target.chance_share": 0.5,
}  # fmt: skip


def identity(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a plain config that decides the results of a run. A resume compares it."""
    of_task = {f"task.{key}": value for key, value in added_options(config["task"].get("name")).items()}
    added = _ADDED | of_task

    def part(tree: dict[str, Any], group: str = "") -> dict[str, Any]:
        return {
            name: part(value, f"{key}.") if isinstance(value, dict) and not group else value
            for name, value in tree.items()
            if (key := group + name) not in _NOT_IDENTITY and added.get(key, _ABSENT) != value
        }

    kept: dict[str, Any] = redact_urls(part(config))  # a url with a new signature names the same data
    kept["data"]["max_bad_examples"] = 0  # no effect until it is exceeded
    return kept


def run_id(config: dict[str, Any]) -> str:
    """Return ten hex digits that name a run by its identity."""
    return hashlib.sha256(json.dumps(identity(config), sort_keys=True).encode()).hexdigest()[:10]


def changes(recorded: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return one line per difference that prevents a resume. Budgets may grow."""
    return differences(identity(recorded), identity(now)) + smaller_budgets(recorded, now, COUNTED_BUDGETS)


def differences(recorded: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return one line per key whose value differs, such as ``echo.factor: 2 in the folder, 4 now``."""
    old, new = dict(flat(recorded)), dict(flat(now))
    return [
        f"{key}: {_show(old.get(key, _ABSENT))} in the folder, {_show(new.get(key, _ABSENT))} now"
        for key in old | new
        if old.get(key, _ABSENT) != new.get(key, _ABSENT)
    ]


def smaller_budgets(recorded: dict[str, Any], now: dict[str, Any], keys: Sequence[str]) -> list[str]:
    """Return one line per budget that is below the recorded one."""
    pairs = [(key, recorded.get(key), now.get(key)) for key in keys]
    return [
        f"{key}: {_show(old)} in the folder, {_show(new)} now (a budget can only grow)"
        for key, old, new in pairs
        if new is not None and (old is None or new < old)
    ]


def flat(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return dotted keys and their values."""
    items: list[tuple[str, Any]] = []
    for key, value in tree.items():
        inner = isinstance(value, dict) and value
        items += flat(value, f"{prefix}{key}.") if inner else [(f"{prefix}{key}", value)]
    return items


def _show(value: Any) -> str:
    return "absent" if value is _ABSENT else "null" if value is None else str(value)
