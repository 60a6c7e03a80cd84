"""Running one trial, the same way in a local worker and in a cluster's job."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import adaecho
from adaecho.config.schema import from_plain
from adaecho.search.hopeless import Hopeless

RunTrial = Callable[..., dict[str, Any]]
MAX_ATTEMPTS = 3  # a failed trial is retried twice


def execute(
    run_trial: RunTrial, config: dict[str, Any], folder: Path, overrides: Sequence[str], group: str
) -> dict[str, Any]:
    """The summary of the trial with this plain config, run or continued in ``folder``."""
    valid = from_plain(config)
    is_hopeless = Hopeless(folder) if valid.search.stop_hopeless else None
    return run_trial(valid, folder, overrides, group=group, is_hopeless=is_hopeless)


def code_digest() -> str:
    """Names the code: a hash over every Python file of the package."""
    package = Path(adaecho.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
