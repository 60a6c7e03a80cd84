"""Find the part of a config that affects the results of a run, and name run folders by its hash."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from adaecho.config.tasks import added_options
from adaecho.errors import redact_urls

_ABSENT = object()

COUNTED_BUDGETS = ("max_steps", "max_fresh_examples")  # a resumed run may raise but not lower these
BUDGETS = (*COUNTED_BUDGETS, "max_train_time_s")
# Keys that do not affect a run's results up to a given step, so they may change when the run is resumed.
_NOT_IDENTITY = {
    *BUDGETS, "tracking", "callbacks", "search", "restart", "checkpoint_every_s", "rank_timeout_s",
    "data.num_workers", "data.processes", "data.prefetch", "data.allow_changed", "echo.buffer_format",
}  # fmt: skip
# Keys that were added after the first results were recorded, each with the value that keeps the earlier
# behavior. A key with this value is left out of the identity, so that existing run folders keep their names
# and existing searches keep their points.
_ADDED = {
    "compile": "off", "adascale.rule": "gain", "data.order": "permutation", "echo.split_augmentation": False,
    "optimizer.name": "sgd", "optimizer.beta1": 0.9, "optimizer.beta2": 0.999, "optimizer.epsilon": 1e-8,
    "optimizer.decay_norms_and_biases": True, "optimizer.max_grad_norm": None, "optimizer.fused": False,
    "optimizer.zero_redundancy": False, "optimizer.ema_decay": None, "schedule.decay_epochs": None,
    "schedule.warmup_epochs": None, "schedule.first_milestone_steps": None,
    "schedule.first_milestone_epochs": None, "schedule.milestone_gap_steps": None,
    "schedule.milestone_gap_epochs": None,
    "schedule.milestone_factor": 10.0, "schedule.unit": "steps", "evaluate.max_examples": None,
    "target.consecutive": 1, "target.chance_level": None, "target.chance_share": 0.5,
}  # fmt: skip


# Run ids and the points of searches are computed from digests of keys and values. When a key or value is
# renamed, digests keep using its old name, which is listed here, so that ids and points do not change.
_DIGEST_NAMES = {
    "echo.split_augmentation": "split", "optimizer.max_grad_norm": "clip_norm", "schedule.unit": "counts",
    "schedule.first_milestone_steps": "first_drop_steps", "schedule.milestone_gap_steps": "drop_gap_steps",
    "schedule.first_milestone_epochs": "first_drop_epochs",
    "schedule.milestone_gap_epochs": "drop_gap_epochs", "schedule.milestone_factor": "drop_factor",
    "target.consecutive": "in_a_row", "target.chance_level": "chance",
    "task.color_jitter": "colour_distortion", "task.block_size": "block",
    "task.vocab_size": "vocabulary", "task.sample_by": "lines",
}  # fmt: skip
_DIGEST_VALUES: dict[str, dict[Any, Any]] = {
    "schedule.shape": {"step_decay": "drops"},
    "data.order": {"sequential": "stored"},
    "task.sample_by": {"line": True, "document": False},
}


def identity(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a config that affects the results of a run."""
    of_task = {f"task.{key}": value for key, value in added_options(config["task"].get("name")).items()}
    added = _ADDED | of_task

    def part(tree: dict[str, Any], group: str = "") -> dict[str, Any]:
        return {
            name: part(value, f"{key}.") if isinstance(value, dict) and not group else value
            for name, value in tree.items()
            if (key := group + name) not in _NOT_IDENTITY and added.get(key, _ABSENT) != value
        }

    kept: dict[str, Any] = redact_urls(part(config))  # the same data may have a newly signed url
    kept["data"]["max_bad_examples"] = 0  # affects whether a run fails, but not its results
    return kept


def digest_key(key: str) -> str:
    """Return the original name of a config key, which hashes use even after the key is renamed."""
    group, _, name = key.rpartition(".")
    return f"{group}.{_DIGEST_NAMES.get(key, name)}" if group else name


def digest_form(kept: dict[str, Any], group: str = "") -> dict[str, Any]:
    """Replace renamed keys and values with their original names, for use in hashes."""
    form = {}
    for name, value in kept.items():
        key, values = group + name, _DIGEST_VALUES.get(group + name)
        is_group = isinstance(value, dict) and not group
        form[_DIGEST_NAMES.get(key, name)] = (
            digest_form(value, f"{key}.") if is_group else values.get(value, value) if values else value
        )
    return form


def run_id(config: dict[str, Any]) -> str:
    """Return the name of a run: ten hexadecimal digits of a hash of the config."""
    form = digest_form(identity(config))
    return hashlib.sha256(json.dumps(form, sort_keys=True).encode()).hexdigest()[:10]


def changes(recorded: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return one line for each difference between two configs that prevents a run from being resumed."""
    return differences(identity(recorded), identity(now)) + smaller_budgets(recorded, now, COUNTED_BUDGETS)


def differences(recorded: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return one line for each key whose values differ, such as ``echo.factor: 2 in the folder, 4 now``."""
    old, new = dict(flat(recorded)), dict(flat(now))
    return [
        f"{key}: {_show(old.get(key, _ABSENT))} in the folder, {_show(new.get(key, _ABSENT))} now"
        for key in old | new
        if old.get(key, _ABSENT) != new.get(key, _ABSENT)
    ]


def smaller_budgets(recorded: dict[str, Any], now: dict[str, Any], keys: Sequence[str]) -> list[str]:
    """Return one line for each budget that is smaller now than in the recorded config."""
    pairs = [(key, recorded.get(key), now.get(key)) for key in keys]
    return [
        f"{key}: {_show(old)} in the folder, {_show(new)} now (a budget can only grow)"
        for key, old, new in pairs
        if new is not None and (old is None or new < old)
    ]


def flat(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Flatten nested dicts into a list of (dotted key, value) pairs."""
    items: list[tuple[str, Any]] = []
    for key, value in tree.items():
        inner = isinstance(value, dict) and value
        items += flat(value, f"{prefix}{key}.") if inner else [(f"{prefix}{key}", value)]
    return items


def _show(value: Any) -> str:
    return "absent" if value is _ABSENT else "null" if value is None else str(value)
