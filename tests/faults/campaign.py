"""Faults at random places of small real runs, each resumed and compared with the undisturbed run.

    python -m tests.faults.campaign                      # the long form: 2,000 kills, an hour on one core
    python -m tests.faults.campaign --kills 50 --sweeps 0 --power-cuts 0
    python -m tests.faults.campaign --limit-s 1200 --out results/faults/campaign.json

The kinds take turns, so that a campaign that is cut short has seen all of them. The places follow from
``--seed``; those of sweeps, whose processes race, do not. A story is one run with all its faults; it must end
the ``same`` as the undisturbed run (metrics, summary and weights, clocks aside). Damage that can't be undone
may be ``refused`` instead, with a message; ``different`` and ``crashed`` must stay 0. Power cuts need root,
for they copy a mounted loop device in mid-run.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir

from adaecho.config.schema import from_plain, to_plain
from adaecho.run import CONF
from tests.faults import piece
from tests.faults.workloads import WORKLOADS, change, config_of
from tests.shards import hostile

STEPS = 24
# Disk touches and steps of one undisturbed run, about: where faults fall.
PLACES = 420
TOUCHES = 100  # the same of a run of a workload
ROUNDS = 40
HEADERS = 250  # archives of one story
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
DAMAGED = ("checkpoint/last.pt", "checkpoint/last.pt", "metrics.jsonl", "config.yaml", "environment.json")

Outcome = Counter[str]


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

    def _run_undisturbed(self, arm: str) -> str:
        folder = self.root / f"undisturbed-{arm}"
        assert piece.finish(self._plain(arm), folder) == piece.DONE
        return fingerprint(folder)

    def _plain(self, run: str) -> dict[str, Any]:
        """The config of an arm on embedded digits, or of a workload on its files."""
        return plain(run) if run in ARMS else config_of(run, self.root / f"data-{run}")

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

    def _judge(self, arm: str, folder: Path, code: int) -> str:
        if code in (piece.REFUSED, piece.CRASHED) or code < 0:
            return "refused" if code == piece.REFUSED else "crashed"
        return "same" if fingerprint(folder) == self._undisturbed(arm) else "different"

    def killed(self, choose: random.Random, arm: str, folder: Path) -> Outcome:
        """Killed again and again, at any touch of the disk or step, until it comes to its end."""
        outcome = Counter(stories=1)
        while (code := piece.finish(plain(arm), folder, "kill", choose.randrange(1, PLACES))) < 0:
            outcome["faults"] += 1
        outcome[self._judge(arm, folder, code)] += 1
        return outcome

    def filled(self, choose: random.Random, arm: str, folder: Path) -> Outcome:
        """The disk is full from some write on; with room again, the same command."""
        full = piece.finish(plain(arm), folder, "full", choose.randrange(1, PLACES // 2))
        outcome = Counter(stories=1, faults=1)
        if full == piece.CRASHED:
            outcome["crashed"] += 1
        else:
            outcome[self._judge(arm, folder, piece.finish(plain(arm), folder))] += 1
        return outcome

    def damaged(self, choose: random.Random, arm: str, folder: Path) -> Outcome:
        """A flipped bit, a zeroed sector or a cut in a record of a run that was killed half-way."""
        if piece.finish(plain(arm), folder, "kill", choose.randrange(PLACES // 4, PLACES // 2)) >= 0:
            return Counter()
        path = folder / choose.choice(DAMAGED)
        if not path.exists() or not (data := bytearray(path.read_bytes())):
            return Counter()
        place = choose.randrange(len(data))
        match choose.choice(("bit", "bit", "sector", "cut")):
            case "bit":
                data[place] ^= 1 << choose.randrange(8)
            case "sector":
                start = place // 512 * 512
                data[start : start + 512] = bytes(len(data[start : start + 512]))
            case "cut":
                del data[place:]
        path.write_bytes(data)
        code = piece.finish(plain(arm), folder)
        return Counter({"stories": 1, "faults": 1, self._judge(arm, folder, code): 1})

    def cut(self, choose: random.Random, arm: str, folder: Path) -> Outcome:
        """The device is copied in mid-run, the copy mounted, and the run continued there."""
        image, copy = folder.with_suffix(".image"), folder.with_suffix(".copy")
        _make_device(image, 24 << 20)
        try:
            with _mounted(image, folder):
                process = piece.start(plain(arm), folder / "run", "stop", choose.randrange(1, PLACES))
                while process.is_alive() and _state(process.pid) != "T":
                    time.sleep(0.005)
                shutil.copyfile(image, copy)
                process.kill()
                process.join()
            with _mounted(copy, folder):
                code = piece.finish(plain(arm), folder / "run")
                return Counter({"stories": 1, "faults": 1, self._judge(arm, folder / "run", code): 1})
        finally:
            image.unlink()
            copy.unlink(missing_ok=True)

    def workload(self, choose: random.Random, _arm: str, folder: Path) -> Outcome:
        """Parquet, pickles, tar shards, photographs, boxes or text: killed until it comes to its end."""
        name = choose.choice(list(WORKLOADS))
        outcome = Counter({"stories": 1, name: 1})
        while (code := piece.finish(self._plain(name), folder, "kill", choose.randrange(1, TOUCHES))) < 0:
            outcome["faults"] += 1
        outcome[self._judge(name, folder, code)] += 1
        return outcome

    def changed(self, choose: random.Random, _arm: str, folder: Path) -> Outcome:
        """A bit of the data flips while a run is stopped: refused; with the data put back, the same."""
        name = choose.choice(list(WORKLOADS))
        if not self._stopped(name, choose, folder):
            return Counter()
        data, kept = Path(self._plain(name)["data"]["path"]), folder.with_suffix(".data")
        shutil.copytree(data, kept)
        change(choose, data)
        code = piece.finish(self._plain(name), folder)
        shutil.rmtree(data)
        shutil.copytree(kept, data)
        outcome = Counter({"stories": 1, "faults": 1, name: 1})
        if code != piece.REFUSED:
            outcome["different" if code == piece.DONE else "crashed"] += 1
            return outcome
        outcome["refused_before"] += 1
        outcome[self._judge(name, folder, piece.finish(self._plain(name), folder))] += 1
        return outcome

    def cached(self, choose: random.Random, _arm: str, folder: Path) -> Outcome:
        """A bit of the cache of tokens flips while a run is stopped: it is made anew."""
        if not self._stopped("lm1b", choose, folder):
            return Counter()
        change(choose, self.root / piece.CACHE)
        code = piece.finish(self._plain("lm1b"), folder)
        return Counter({"stories": 1, "faults": 1, self._judge("lm1b", folder, code): 1})

    def _stopped(self, name: str, choose: random.Random, folder: Path) -> bool:
        """Kill a run of a workload somewhere; whether that left a checkpoint."""
        self._undisturbed(name)
        piece.finish(self._plain(name), folder, "kill", choose.randrange(20, TOUCHES))
        return (folder / "checkpoint/last.pt").exists() and not (folder / "model/final.safetensors").exists()

    def figures(self, choose: random.Random, _arm: str, folder: Path) -> Outcome:
        """``python -m adaecho.figures`` killed anywhere, and run again: every file the same to the byte."""
        results, reference = self.root / "results/quickstart", self.root / "undisturbed-figures"
        if not reference.exists():
            shutil.copytree(Path(__file__).parents[2] / "results/quickstart", results)
            begun = time.monotonic()
            assert _draw(results.parent, reference).wait() == 0
            self._drawing_s = time.monotonic() - begun
        outcome = Counter(stories=1)
        for _ in range(choose.randrange(1, 4)):
            drawing = _draw(results.parent, folder)
            time.sleep(choose.uniform(0, self._drawing_s))
            outcome["faults"] += drawing.poll() is None
            drawing.kill()
            drawing.wait()
        code = _draw(results.parent, folder).wait()
        drawn = [{path.name: path.read_bytes() for path in one.iterdir()} for one in (reference, folder)]
        outcome["crashed" if code else "same" if drawn[0] == drawn[1] else "different"] += 1
        return outcome

    def headers(self, choose: random.Random, _arm: str, folder: Path) -> Outcome:
        """Tar archives with mutated headers, read as the standard library reads them or refused by byte."""
        folder.mkdir()
        outcome = Counter(stories=HEADERS, faults=HEADERS)
        for _ in range(HEADERS):
            content = hostile.mutated(hostile.archive(choose), choose)
            outcome[hostile.verdict(content, folder / "shard.tar").partition(" ")[0].rstrip(":")] += 1
        return outcome

    def sweep(self, choose: random.Random, _arm: str, folder: Path) -> Outcome:
        """A sweep of which a worker, the launcher or the whole group is killed, until it comes to its end."""
        outcome = Counter(stories=1)
        for _ in range(choose.randrange(1, 4)):
            launcher = _launch(folder)
            _wait_for(launcher, folder, "*/*/*/metrics.jsonl")
            time.sleep(choose.uniform(0, 2))
            whom = choose.choice(("worker", "launcher", "group"))
            killed = _kill_some(launcher, whom)
            outcome["faults"] += killed
            outcome[f"{whom}_killed"] += killed
            launcher.wait()
        outcome[self._judge_sweep(folder)] += 1
        return outcome

    def _judge_sweep(self, folder: Path) -> str:
        """Let a sweep come to its end; how it compares with the undisturbed one."""
        reference = self.root / "undisturbed-sweep"
        if not reference.exists():
            assert _launch(reference).wait() == 0
        code = _launch(folder).wait()
        trials = [path.parent.relative_to(reference) for path in sorted(reference.glob("*/*/*/summary.json"))]
        same = code == 0 and all(fingerprint(reference / x) == fingerprint(folder / x) for x in trials)
        return "same" if same and trials else "different" if code == 0 else "crashed"

    def ranks(self, choose: random.Random, arm: str, folder: Path) -> Outcome:
        """Two ranks under torchrun: one, both or the launcher is killed, until they come to an end."""
        outcome = Counter(stories=1)
        for _ in range(choose.randrange(1, 4)):
            launcher = _launch_ranks(arm, folder)
            _wait_for(launcher, folder, "checkpoint/last.pt")
            time.sleep(choose.uniform(0, 8))
            ranks = _children(launcher.pid) if launcher.poll() is None else []
            whom = choose.choice(("one_rank", "all_ranks", "launcher"))
            victims = {"one_rank": [choose.choice(ranks or [0])], "all_ranks": ranks}.get(
                whom, [launcher.pid]
            )
            if ranks:
                for pid in victims:
                    _signal(pid)
                outcome["faults"] += 1
                outcome[f"{whom}_killed"] += 1
            launcher.wait()
            while any(_state(pid) not in "XZ" for pid in ranks):
                time.sleep(0.1)
        outcome[self._judge_ranks(arm, folder)] += 1
        return outcome

    def _judge_ranks(self, arm: str, folder: Path) -> str:
        reference = self.root / f"undisturbed-ranks-{arm}"
        if not reference.exists():
            assert _launch_ranks(arm, reference).wait() == 0
        code = _launch_ranks(arm, folder).wait()
        same = code == 0 and fingerprint(reference) == fingerprint(folder)
        return "same" if same else "different" if code == 0 else "crashed"

    def sweep_cut(self, choose: random.Random, _arm: str, folder: Path) -> Outcome:
        """A power cut while a sweep's launcher and workers are at it, and the sweep continued."""
        with _cut_off(folder, _launch, "*/*/*/metrics.jsonl", choose.uniform(0, 2)) as run:
            return Counter({"stories": 1, "faults": 1, self._judge_sweep(run): 1})

    def ranks_cut(self, choose: random.Random, arm: str, folder: Path) -> Outcome:
        """The same of two ranks under torchrun."""
        begin = partial(_launch_ranks, arm)
        with _cut_off(folder, begin, "checkpoint/last.pt", choose.uniform(0, 8)) as run:
            return Counter({"stories": 1, "faults": 1, self._judge_ranks(arm, run): 1})


def _draw(results: Path, into: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "adaecho.figures", "--results", str(results), "--into", str(into)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def _wait_for(launcher: "subprocess.Popen[bytes]", folder: Path, pattern: str) -> None:
    """Wait until a launcher's processes have written such a file, or it has ended."""
    deadline = time.monotonic() + 240
    while not list(folder.glob(pattern)) and launcher.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)


@contextmanager
def _cut_off(
    folder: Path, begin: Callable[[Path], "subprocess.Popen[bytes]"], pattern: str, after_s: float
) -> Iterator[Path]:
    """What a power cut leaves of what ``begin`` starts, some time after the first such file, while mounted.

    The processes stand still while their device is copied, as all do at once in a power cut.
    """
    image, copy = folder.with_suffix(".image"), folder.with_suffix(".copy")
    _make_device(image, 64 << 20)
    try:
        with _mounted(image, folder):
            launcher = begin(folder / "run")
            _wait_for(launcher, folder / "run", pattern)
            time.sleep(after_s)
            stopped: list[int] = []
            while new := [pid for pid in _tree(launcher.pid) if pid not in stopped]:
                for pid in new:
                    _signal(pid, signal.SIGSTOP)
                stopped += new
            while any(_state(pid) not in "TXZ" for pid in stopped):
                time.sleep(0.005)
            shutil.copyfile(image, copy)
            for pid in stopped:
                _signal(pid)
            launcher.wait()
            while any(_state(pid) not in "XZ" for pid in stopped):
                time.sleep(0.05)
        with _mounted(copy, folder):
            yield folder / "run"
    finally:
        image.unlink()
        copy.unlink(missing_ok=True)


def _make_device(image: Path, size: int) -> None:
    with image.open("wb") as file:
        file.truncate(size)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)


def _launch_ranks(arm: str, folder: Path) -> "subprocess.Popen[bytes]":
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    overrides = [*RUN, *ARMS[arm], "max_steps=1500", "checkpoint_every_s=0.1", f"hydra.run.dir={folder}"]
    null = subprocess.DEVNULL
    return subprocess.Popen([*start, "-m", "adaecho.run", *overrides], stdout=null, stderr=null)


def _launch(folder: Path) -> "subprocess.Popen[bytes]":
    overrides = [
        *RUN, "echo=none,batch", "search.trials=2", "search.repeats=1", f"hydra.sweep.dir={folder}",
        "search.workers=2",
    ]  # fmt: skip
    command = [sys.executable, "-m", "adaecho.run", "-m", *overrides]
    null = subprocess.DEVNULL
    return subprocess.Popen(command, stdout=null, stderr=null, start_new_session=True)


def _kill_some(launcher: "subprocess.Popen[bytes]", whom: str) -> int:
    """Kill a worker, the launcher or all of them; how many faults that was."""
    if launcher.poll() is not None:
        return 0
    workers = _children(launcher.pid)
    if whom == "worker":
        for pid in workers[:1]:
            _signal(pid)
        return len(workers[:1])
    launcher.kill()
    if whom == "group":
        for pid in workers:
            _signal(pid)
    return 1


def _signal(pid: int, number: int = signal.SIGKILL) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


def _tree(pid: int) -> list[int]:
    """A process and all below it; a thread may have started a child, too."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += [one for child in path.read_text().split() for one in _tree(int(child))]
    return [pid, *found]


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "X"


@contextmanager
def _mounted(image: Path, folder: Path) -> Iterator[None]:
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, count in (
        ("kills", 2000),
        ("damages", 400),
        ("full-disks", 200),
        ("power-cuts", 60),
        ("sweeps", 40),
        ("rank-kills", 40),
        ("headers", 100_000),
        ("workloads", 400),
        ("changes", 200),
        ("caches", 100),
        ("figures", 40),
        ("sweep-cuts", 20),
        ("rank-cuts", 20),
    ):
        parser.add_argument(f"--{name}", type=int, default=count)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-s", type=float, default=math.inf, help="begin no round after so long")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    memory = Path("/dev/shm")  # where a sync costs nothing; a kill loses no page of it
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as root:
        campaign = Campaign(Path(root), given.seed)
        kinds = {
            "kills": campaign.killed, "damages": campaign.damaged, "full_disks": campaign.filled,
            "power_cuts": campaign.cut, "sweeps": campaign.sweep, "rank_kills": campaign.ranks,
            "headers": campaign.headers, "workloads": campaign.workload, "changes": campaign.changed,
            "caches": campaign.cached, "figures": campaign.figures,
            "sweep_cuts": campaign.sweep_cut, "rank_cuts": campaign.ranks_cut,
        }  # fmt: skip
        begun = time.monotonic()
        for round_ in range(1, ROUNDS + 1):
            if time.monotonic() - begun > given.limit_s:
                break
            for kind, story in kinds.items():
                campaign.tell(kind, story, getattr(given, kind) * round_ // ROUNDS)
            print(f"round {round_}/{ROUNDS}", json.dumps(campaign.outcomes), flush=True)
            if given.out is not None:
                given.out.parent.mkdir(parents=True, exist_ok=True)
                record = {"seed": given.seed, **campaign.outcomes}
                given.out.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
