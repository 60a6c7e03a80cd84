"""Faults at random places of small real runs, each resumed and compared with the undisturbed run.

    python -m tests.faults.campaign                      # the long form: 2,000 kills, an hour on one core
    python -m tests.faults.campaign --kills 50 --sweeps 0 --rank-kills 0
    python -m tests.faults.campaign --limit-s 1200 --out results/faults/campaign.json

The kinds take turns, so that a campaign that is cut short has seen all of them. The places follow from
``--seed``; those of sweeps, whose processes race, do not. A story is one run with all its faults; it must end
the ``same`` as the undisturbed run (metrics, summary and weights, clocks aside); ``different`` and
``crashed`` must stay 0.
"""

import argparse
import hashlib
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir

from adaecho.config.schema import from_plain, to_plain
from adaecho.run import CONF
from tests.faults import piece

STEPS = 24
# Disk touches and steps of one undisturbed run, about: where faults fall.
PLACES = 420
ROUNDS = 40
ARMS = {
    "none": ("echo=none",),
    "batch": ("echo=batch", "echo.factor=1.5"),
    "before": ("echo=example_before_augmentation", "echo.factor=2", "adascale=on"),
    "after": ("echo=example_after_augmentation", "echo.factor=2.5"),
}
RUN = (
    "tracking=none", "task=digits_mlp", "precision=float32", "device=cpu", "target.value=null",
    "evaluate.every_fresh_examples=128", "checkpoint_every_s=0", f"max_steps={STEPS}",
    "max_fresh_examples=null", "adascale.num_gradients_to_accumulate=2",
)  # fmt: skip

Outcome = Counter[str]
ONE: Outcome = Counter(stories=1, faults=1)
Launch = Callable[[Path], "subprocess.Popen[bytes]"]


@cache
def plain(arm: str) -> dict[str, Any]:
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        return to_plain(from_plain(to_plain(compose("config", overrides=[*RUN, *ARMS[arm]]))))


def fingerprint(folder: Path) -> str:
    """What must not depend on faults: all but clocks, and how often a resume read again."""
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
    """Stories of each kind, told in one temporary folder; ``outcomes`` counts how they ended."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root, self.seed = root, seed
        self.outcomes: dict[str, Outcome] = {}
        self._told: Counter[str] = Counter()
        self._undisturbed = cache(self._run_undisturbed)

    def _run_undisturbed(self, run: str) -> str:
        folder = self.root / f"undisturbed-{run}"
        assert piece.finish(plain(run), folder) == piece.DONE
        return fingerprint(folder)

    def tell(self, kind: str, story: Callable[[random.Random, str, Path], Outcome], until: int) -> None:
        """Tell stories of a kind until that many faults have happened."""
        outcome = self.outcomes.setdefault(kind, Counter(faults=0))
        while outcome["faults"] < until:
            number = self._told[kind]
            self._told[kind] += 1
            choose = random.Random(f"{self.seed} {kind} {number}")
            folder = self.root / f"{kind}-{number}"
            outcome += story(choose, choose.choice(list(ARMS)), folder)
            self.outcomes[kind] = outcome
            for path in self.root.glob(f"{folder.name}*"):
                shutil.rmtree(path)

    def _end(self, run: str, folder: Path, code: int | None = None) -> Outcome:
        """Of a run that is brought to its end, or that ended so."""
        code = piece.finish(plain(run), folder) if code is None else code
        if code != piece.DONE:
            return Counter(crashed=1)
        return Counter({"same" if fingerprint(folder) == self._undisturbed(run) else "different": 1})

    def killed(self, choose: random.Random, arm: str, folder: Path) -> Outcome:
        """Killed again and again, at any touch of the disk or step, until it comes to its end."""
        faults = 0
        while (code := piece.finish(plain(arm), folder, "kill", choose.randrange(1, PLACES))) < 0:
            faults += 1
        return Counter(stories=1, faults=faults) + self._end(arm, folder, code)

    def filled(self, choose: random.Random, arm: str, folder: Path) -> Outcome:
        """The disk is full from some write on; with room again, the same command."""
        full = piece.finish(plain(arm), folder, "full", choose.randrange(1, PLACES // 2))
        return ONE + self._end(arm, folder, full if full == piece.CRASHED else None)

    def sweep(self, choose: random.Random, _arm: str, folder: Path) -> Outcome:
        """A sweep of which a worker, the launcher or the whole group is killed, until it comes to its end."""
        outcome = Counter(stories=1)
        for _ in range(choose.randrange(1, 4)):
            launcher = _launch(folder)
            _wait_for(launcher, folder, "*/*/*/metrics.jsonl")
            time.sleep(choose.uniform(0, 2))
            whom = choose.choice(("worker", "launcher", "group"))
            workers = _children(launcher.pid) if launcher.poll() is None else None
            if workers is not None:
                victims = {"worker": workers[:1], "group": [launcher.pid, *workers]}.get(whom, [launcher.pid])
                _kill(victims)
                killed = int(bool(victims))
                outcome += Counter({"faults": killed, f"{whom}_killed": killed})
            launcher.wait()
        return outcome + self._end_of(folder, "sweep", _launch, "*/*/*/summary.json")

    def ranks(self, choose: random.Random, arm: str, folder: Path) -> Outcome:
        """Two ranks under torchrun: one, both or the launcher is killed, until they come to an end."""
        outcome = Counter(stories=1)
        for _ in range(choose.randrange(1, 4)):
            launcher = _launch_ranks(arm, folder)
            _wait_for(launcher, folder, "checkpoint/last.pt")
            time.sleep(choose.uniform(0, 8))
            ranks = _children(launcher.pid) if launcher.poll() is None else []
            whom = choose.choice(("one_rank", "all_ranks", "launcher"))
            one = choose.choice(ranks or [0])
            if ranks:
                _kill({"one_rank": [one], "all_ranks": ranks}.get(whom, [launcher.pid]))
                outcome += Counter({"faults": 1, f"{whom}_killed": 1})
            launcher.wait()
            _wait(lambda ranks=ranks: all(_state(pid) in "XZ" for pid in ranks))
        return outcome + self._end_of(folder, f"ranks-{arm}", partial(_launch_ranks, arm), "summary.json")

    def _end_of(self, folder: Path, name: str, launch: Launch, summaries: str) -> Outcome:
        """Let several processes come to their end; how it compares with what nothing has disturbed."""
        reference = self.root / f"undisturbed-{name}"
        if not reference.exists():
            assert launch(reference).wait() == 0
        if launch(folder).wait() != 0:
            return Counter(crashed=1)
        runs = [path.parent.relative_to(reference) for path in sorted(reference.glob(summaries))]
        same = runs and all(fingerprint(reference / run) == fingerprint(folder / run) for run in runs)
        return Counter({"same" if same else "different": 1})


def _started(*command: str) -> "subprocess.Popen[bytes]":
    null = subprocess.DEVNULL
    command = (sys.executable, "-m", *command)
    return subprocess.Popen(command, stdout=null, stderr=null, start_new_session=True)


def _launch_ranks(arm: str, folder: Path) -> "subprocess.Popen[bytes]":
    start = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "adaecho.run")
    longer = ("max_steps=1500", "checkpoint_every_s=0.1", f"hydra.run.dir={folder}")
    return _started(*start, *RUN, *ARMS[arm], *longer)


def _launch(folder: Path) -> "subprocess.Popen[bytes]":
    searches = ("echo=none,batch", "search.trials=2", "search.repeats=1", "search.workers=2")
    return _started("adaecho.run", "-m", *RUN, *searches, f"hydra.sweep.dir={folder}")


def _kill(pids: Iterable[int], number: int = signal.SIGKILL) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _wait(until: Callable[[], bool]) -> None:
    while not until():
        time.sleep(0.005)


def _wait_for(launcher: "subprocess.Popen[bytes]", folder: Path, pattern: str) -> None:
    """Wait until a launcher's processes have written such a file, or it has ended."""
    deadline = time.monotonic() + 240
    while not list(folder.glob(pattern)) and launcher.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "X"


# What each option counts, and how many of it the long form tells.
KINDS = {
    "kills": (Campaign.killed, 2000),
    "full-disks": (Campaign.filled, 200),
    "sweeps": (Campaign.sweep, 40),
    "rank-kills": (Campaign.ranks, 40),
}


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    for name, (_, count) in KINDS.items():
        parser.add_argument(f"--{name}", type=int, default=count)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-s", type=float, default=math.inf, help="begin no round after so long")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    memory = Path("/dev/shm")  # where a sync costs nothing; a kill loses no page of it
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as root:
        campaign, begun = Campaign(Path(root), given.seed), time.monotonic()
        for round_ in range(1, ROUNDS + 1):
            if time.monotonic() - begun > given.limit_s:
                break
            for name, (story, _) in KINDS.items():
                kind = name.replace("-", "_")
                campaign.tell(kind, partial(story, campaign), getattr(given, kind) * round_ // ROUNDS)
            print(f"round {round_}/{ROUNDS}", json.dumps(campaign.outcomes), flush=True)
            if given.out is not None:
                given.out.parent.mkdir(parents=True, exist_ok=True)
                record = {"seed": given.seed, **campaign.outcomes}
                given.out.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
