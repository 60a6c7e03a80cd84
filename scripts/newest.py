"""``python scripts/newest.py > constraints.txt``: the newest versions together that pyproject.toml allows.

pip resolves them without installing any; run the gate with them before they are committed. What torch pins
itself (its CUDA libraries) is left to it.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
HEAD = """\
# Versions that were tested together; used as: pip install -c constraints.txt -e '.[dev]'
# torch pins its own CUDA libraries.
"""
# nvimgcodec is ours, setuptools the environment's.
_LEFT_OUT = re.compile(r"adaecho$|setuptools$|triton$|cuda[-_]|nvidia[-_](?!nvimgcodec)")


def constraints(report: dict[str, Any]) -> str:
    """The file's text.

    Args:
        report: pip's installation report, version 1.
    """
    found = [one["metadata"] for one in report["install"]]
    lines = [f"{one['name']}=={one['version']}" for one in found if not _LEFT_OUT.match(one["name"])]
    return HEAD + "".join(f"{line}\n" for line in sorted(lines, key=str.lower))


def main() -> None:
    """The command."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
    command += ["--disable-pip-version-check", "--report", "-", f"{ROOT}[dev]"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    sys.stdout.write(constraints(json.loads(done.stdout)))


if __name__ == "__main__":
    main()
