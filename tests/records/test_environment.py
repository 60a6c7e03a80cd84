"""The recorded environment, and the commits that committed records name."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from adaecho.records import environment as module
from adaecho.records.environment import environment


def test_it_names_versions_and_machine():
    found = environment()
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {"torch", "numpy"} <= found["packages"].keys()
    assert found["cpu_cores"] >= 1
    assert json.loads(json.dumps(found)) == found


def test_slurm_ids_are_those_of_now(monkeypatch):
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    assert environment()["slurm"] == {}
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    assert environment()["slurm"] == {"job_id": "17", "restart_count": "2"}


def git(folder, *arguments):
    """Run git; returns its exit status and output."""
    command = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    return done.returncode, done.stdout.strip()


def test_git_commit_and_whether_the_code_differs_from_it(tmp_path, monkeypatch):
    assert module._git(tmp_path) is None
    git(tmp_path, "init", "-q")
    assert module._git(tmp_path) is None  # no commit yet
    (tmp_path / "code.py").write_text("1")
    git(tmp_path, "add", "code.py")
    assert git(tmp_path, "commit", "-q", "-m", "x") == (0, "")
    _, sha = git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "untracked").write_text("")
    assert module._git(tmp_path) == {"sha": sha, "dirty": False}
    (tmp_path / "code.py").write_text("2")
    assert module._git(tmp_path) == {"sha": sha, "dirty": True}
    monkeypatch.setenv("PATH", "")
    assert module._git(tmp_path) is None


ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("origin", sorted((ROOT / "results").glob("*/*/origin.json")), ids=str)
def test_a_record_names_a_commit_of_this_repository_or_says_why_not(origin):
    if not (ROOT / ".git").exists() or git(ROOT, "rev-parse", "--is-shallow-repository")[1] != "false":
        pytest.skip("no checkout with its history")
    record = json.loads(origin.read_text())
    note = record.get("note", "")
    for made in record["environments"]:
        sha = made["git"] and made["git"]["sha"]
        known = sha and git(ROOT, "merge-base", "--is-ancestor", sha, "HEAD")[0] == 0
        assert known or "established" in note or sha[:7] in note
