"""A sweep's folder: the record of its design, what its workers refused, and trials that failed."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from adaecho.config.identity import differences, smaller_budgets
from adaecho.errors import FolderError
from adaecho.records.environment import environment
from adaecho.records.files import read_json, write_json
from adaecho.records.folder import RunFolder
from adaecho.records.status import ENDED, Status
from adaecho.search.axes import Axis
from adaecho.search.design import Arm, Design, TrialId
from adaecho.search.state import SweepState

REFUSAL = "refusal.json"
_BUDGETS = ("trials", "repeats", "max_diverged")
_MAX_LINES = 8


def record_design(design: Design, folder: Path) -> None:
    """Write ``design.json``: from now on workers find trials to run."""
    write_json(folder / "design.json", design.to_dict())


def check_design(design: Design, folder: Path) -> None:
    """Check that the folder holds no other design; more trials or repeats may be added.

    Raises:
        FolderError: it does (with a diff).
    """
    path = folder / "design.json"
    if not path.exists() and any(folder.glob("*/*/*/config.yaml")):
        raise FolderError(
            f"{folder}: holds trials but no design.json, so it can't be told of which sweep; choose another "
            "hydra.sweep.dir=, or fresh=true to start anew and keep the old folder beside it"
        )
    if path.exists():
        read_design(folder)
        refused = _differences(read_json(path), design.to_dict())
        if refused:
            shown = refused[:_MAX_LINES]
            if len(refused) > _MAX_LINES:
                shown.append(f"and {len(refused) - _MAX_LINES} more")
            raise FolderError(
                f"{folder}: holds another design:\n  "
                + "\n  ".join(shown)
                + "\nRun that design again, choose "
                "another hydra.sweep.dir=, or fresh=true to start anew and keep the old folder beside it"
            )


def read_design(folder: Path) -> Design:
    """The design that a sweep's folder records.

    Raises:
        FolderError: no sweep was begun there, or its record is damaged.
    """
    path = folder / "design.json"
    if not path.exists():
        raise FolderError(f"{folder}: no sweep, for it has no design.json; give the folder that -m printed")
    try:
        return Design.from_dict(read_json(path))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise FolderError(
            f"{path}: is no sweep's design ({type(error).__name__}: {error}). Restore it, or start anew with "
            "fresh=true"
        ) from error


def _differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What may not change, as lines: all but budgets, spelling, and points that a longer design has more of.

    What differs in every arm is told once.
    """
    lines = smaller_budgets(old["search"], new["search"], _BUDGETS)
    for name in ("seed", "prune"):
        lines += differences({f"search.{name}": old["search"][name]}, {f"search.{name}": new["search"][name]})
    names = [set(plain["arms"]) for plain in (old, new)]
    if names[0] != names[1]:
        gone, added = sorted(names[0] - names[1]), sorted(names[1] - names[0])
        lines.append(f"arms: {gone} in the folder, {added} now")
    common = sorted(names[0] & names[1])
    by_arm = {
        name: differences(_compared(name, old["arms"][name]), _compared(name, new["arms"][name]))
        for name in common
    }
    everywhere: list[str] = []
    if len(common) > 1:
        everywhere = [line for line in by_arm[common[0]] if all(line in by_arm[name] for name in common)]
    lines += [f"every arm's {line}" for line in everywhere]
    lines += [f"{name}.{line}" for name in common for line in by_arm[name] if line not in everywhere]
    if not lines:  # they follow from the rest, as long as the code that draws them is the same
        firsts = [{name: plain["arms"][name]["points"][:1] for name in common} for plain in (old, new)]
        drawn = [{name: points[0][0] for name, points in first.items() if points} for first in firsts]
        lines = [f"first point of {line}" for line in differences(*drawn)]
    return lines


def _compared(name: str, plain: dict[str, Any]) -> dict[str, Any]:
    axes = tuple(Axis(key, **axis) for key, axis in plain["axes"].items())
    return Arm(name, (), plain["config"], axes).to_dict()


def read_refusal(folder: Path, launch: str) -> str | None:
    """Why a worker of this launch ended, where only the user can mend it."""
    with suppress(FolderError, KeyError):
        refusal = read_json(folder / REFUSAL)
        return str(refusal["error"]) if refusal["launch"] == launch else None
    return None


def record_failure(state: SweepState, trial: TrialId, error: str) -> None:
    """See that a failed trial's summary says so, also where its process died without a word.

    Raises:
        FolderInUseError: another process is at the trial.
    """
    run = RunFolder(state.trial_folder(trial))
    with run.lock():
        summary = run.read_summary() or {"to_target": None, "best": None}
        if summary.get("status") in ENDED:
            return
        if run.read_config() is None:  # a folder with records but no config could not be continued
            arm, point = state.search(trial).arm, (trial.repeat, trial.index)
            config, typed = state.design.trial_config(arm, *point), state.design.trial_overrides(arm, *point)
            run.start(config, typed, environment())
        run.write_summary({**summary, "status": Status.FAILED, "error": error})
