"""A peer in a process of its own, perhaps of another Python, where two libraries don't go together."""

import os
import subprocess
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]


class Peer:
    """Runs a module, or a script by its path, which says "ready" and then answers each line with numbers.

    Args:
        python: the interpreter.
        module: ``package.module``, or a path that ends in ``.py``.
        arguments: of it.
        path: where its imports come from.

    Attributes:
        found: whether it started; False where its library is absent.
    """

    def __init__(self, python: str, module: str, *arguments: str, path: str = str(CHECKOUT)) -> None:
        environment = {
            **os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path
        }  # fmt: skip
        self._process = subprocess.Popen(
            [python, *([] if module.endswith(".py") else ["-m"]), module, *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env=environment,
        )  # fmt: skip
        answer = self._answer()
        self.found = answer.startswith("ready")
        self.version = answer.removeprefix("ready").strip() if self.found else "absent"
        if not self.found:
            print(f"{module} does not start with {python}: that side is left out")

    def rate(self, *words: object) -> float:
        """Ask for one measurement."""
        return self.numbers(*words)[0]

    def numbers(self, *words: object) -> list[float]:
        """Ask for several at once."""
        assert self._process.stdin is not None
        print(*words, file=self._process.stdin, flush=True)
        return [float(number) for number in self._answer().split()]

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def close(self) -> None:
        """End the process; one that hangs at its exit, as TensorFlow's may, is killed."""
        try:
            self._process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
