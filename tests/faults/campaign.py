"""Run small real runs with faults at random instants, and compare each with the undisturbed run.

    python -m tests.faults.campaign                      # the long form: 2,000 kills, an hour on one core
    python -m tests.faults.campaign --kills 50 --full-disks 0 --seed 1

Each story is one run with its faults. It must end the ``same`` as the undisturbed run: metrics, summary and
weights, without times. ``different`` and ``crashed`` must stay 0. ``--seed`` decides the instants.
"""

import argparse
import hashlib
import json
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir

from adaecho.config.schema import from_plain, to_plain
from adaecho.run import CONF
from tests.faults import piece

PLACES = 420  # about the number of disk operations and steps of one undisturbed run
ARMS = {
    "none": ("echo=none",),
    "batch": ("echo=batch", "echo.factor=1.5"),
    "before": ("echo=example_before_augmentation", "echo.factor=2", "adascale=on"),
    "after": ("echo=example_after_augmentation", "echo.factor=2.5"),
}
RUN = (
    "tracking=none", "task=digits_mlp", "precision=float32", "device=cpu", "target.value=null",
    "evaluate.every_fresh_examples=128", "checkpoint_every_s=0", "max_steps=24",
    "max_fresh_examples=null", "adascale.num_gradients_to_accumulate=2",
)  # fmt: skip

Outcome = Counter[str]


@cache
def plain(arm: str) -> dict[str, Any]:
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        return to_plain(from_plain(to_plain(compose("config", overrides=[*RUN, *ARMS[arm]]))))


def fingerprint(folder: Path) -> str:
    """A digest of all records without times and re-reads."""
    timed = ("_s", "_s_per_batch", "_s_per_step", "R", "reread_examples")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    for costs in [summary, *lines, *(x for x in (summary["best"], summary["to_target"]) if x)]:
        for key in [key for key in costs if key.endswith(timed)]:
            del costs[key]
    digest = hashlib.sha256(json.dumps([lines, summary], sort_keys=True).encode())
    for path in sorted(folder.glob("model/*")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class Campaign:
    """Stories of each kind in one temporary folder; ``outcomes`` counts how they ended."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root, self.seed = root, seed
        self.outcomes: dict[str, Outcome] = {}
        self._undisturbed = cache(self._run_undisturbed)

    def _run_undisturbed(self, arm: str) -> str:
        folder = self.root / f"undisturbed-{arm}"
        assert piece.finish(plain(arm), folder) == piece.DONE
        return fingerprint(folder)

    def run(self, kind: str, story: Callable[[random.Random, str, Path], Outcome], faults: int) -> None:
        """Run stories of a kind until this many faults have happened."""
        outcome = self.outcomes.setdefault(kind, Counter(faults=0))
        while outcome["faults"] < faults:
            number = outcome["stories"]
            choose = random.Random(f"{self.seed} {kind} {number}")
            folder = self.root / f"{kind}-{number}"
            outcome += story(choose, choose.choice(list(ARMS)), folder)
            self.outcomes[kind] = outcome
            for path in self.root.glob(f"{folder.name}*"):
                shutil.rmtree(path)

    def _end(self, arm: str, folder: Path, code: int) -> Outcome:
        if code != piece.DONE:
            return Counter(crashed=1)
        return Counter({"same" if fingerprint(folder) == self._undisturbed(arm) else "different": 1})

    def killed(self, choose: random.Random, arm: str, folder: Path) -> Outcome:
        """Kill a run again and again, at any disk operation or step, until it ends."""
        faults = 0
        while (code := piece.finish(plain(arm), folder, "kill", choose.randrange(1, PLACES))) < 0:
            faults += 1
        return Counter(stories=1, faults=faults) + self._end(arm, folder, code)

    def filled(self, choose: random.Random, arm: str, folder: Path) -> Outcome:
        """Fill the disk from some write on; then repeat the command with free space."""
        code = piece.finish(plain(arm), folder, "full", choose.randrange(1, PLACES // 2))
        if code != piece.CRASHED:
            code = piece.finish(plain(arm), folder)
        return Counter(stories=1, faults=1) + self._end(arm, folder, code)


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--kills", type=int, default=2000)
    parser.add_argument("--full-disks", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    memory = Path("/dev/shm")  # fsync is fast there, and a kill loses no page
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as root:
        campaign = Campaign(Path(root), given.seed)
        for kind, faults in {"killed": given.kills, "filled": given.full_disks}.items():
            campaign.run(kind, partial(getattr(Campaign, kind), campaign), faults)
            print(json.dumps(campaign.outcomes), flush=True)


if __name__ == "__main__":
    main()
