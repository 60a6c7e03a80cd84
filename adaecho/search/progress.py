"""What a sweep shows while it works: a live table on a terminal, one line per trial elsewhere.

It is read from the run folders, so it does not matter where the trials run.
"""

import time
from collections.abc import Iterable
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from adaecho.records.outcome import lowest
from adaecho.records.status import ENDED, FINISHED, Status
from adaecho.records.table import NARROW, Column, as_clock
from adaecho.records.terminal import NARROW_WIDTH, Terminal, terminal_table
from adaecho.search.design import TrialId
from adaecho.search.state import Search, SweepState

_LOOK_EVERY_S = 0.5


class SweepProgress:
    """Follows a sweep; ``update`` as often as wanted: it reads the folders about twice a second at most.

    Args:
        state: of the sweep; read again at each call.
        console: where to; a terminal gets the live table.
    """

    def __init__(self, state: SweepState, console: Console | None = None) -> None:
        self._state = state
        self._running: list[TrialId] = []
        self._console = console or Terminal(markup=False)
        self._started = time.monotonic()
        self._durations_s: dict[str, list[float]] = {}
        self._known = {trial: status for trial in state.wanted() if (status := state.status(trial)) in ENDED}
        self._next_look = 0.0
        self._live: Live | None = None
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False)

    def __enter__(self) -> "SweepProgress":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self.show([])
            self._live.stop()

    def update(self, *, at_once: bool = False) -> None:
        """Take over what the folders say, and tell what has ended since."""
        begin = time.monotonic()
        if begin < self._next_look and not at_once:
            return
        self._state.refresh()
        trials = self._state.wanted()
        for trial in trials:
            status = self._state.status(trial)
            if status in ENDED and self._known.get(trial) != status:
                self._known[trial] = status
                summary = self._state.search(trial).summaries[trial.index]
                self.ended(trial, summary.get("train_time_s", 0) + summary.get("eval_time_s", 0))
        self.show(trial for trial in trials if self._state.status(trial) == Status.RUNNING)
        # A look at thousands of folders takes a while: it may take a twentieth of the time.
        self._next_look = begin + max(_LOOK_EVERY_S, 20 * (time.monotonic() - begin))

    def show(self, running: Iterable[TrialId]) -> None:
        """Redraw the live table; as many as are running now are assumed to run until the end."""
        self._running = list(running)
        if self._live is not None:
            footer = Text(f"{as_clock(time.monotonic() - self._started)} so far, {self._time_left()}")
            # A table that is taller than the terminal could not be drawn over again.
            table = arm_table(self._state, self._running, max_arms=max(1, self._console.height - 4))
            self._live.update(Group(table, footer), refresh=True)

    def ended(self, trial: TrialId, duration_s: float) -> None:
        """A trial has ended as the state now says, ``duration_s`` after its start."""
        self._durations_s.setdefault(trial.arm, []).append(duration_s)
        if self._live is None:
            total = sum(search.num_wanted() for search in self._state.searches.values())
            done = sum(status in FINISHED for status in self._known.values())  # of one look, those told of
            outcome = describe(self._state.search(trial), trial.index)
            self._console.print(
                f"{done}/{total}  {trial}: {outcome}; {self._time_left()}", soft_wrap=True, highlight=False
            )

    def _time_left(self) -> str:
        known = [duration for durations in self._durations_s.values() for duration in durations]
        if not known:
            return "time left not known yet"
        left_s = 0.0
        for search in self._state.searches.values():
            durations = self._durations_s.get(search.arm.name, known)
            left_s += sum(1 for _ in search.missing()) * sum(durations) / len(durations)
        return f"about {as_clock(left_s / max(1, len(self._running)))} left"


def arm_table(state: SweepState, running: list[TrialId], max_arms: int | None = None) -> Table:
    """Arms (the first ``max_arms``) against how trials ended, and the best."""
    arms: dict[str, list[Search]] = {}
    for search in state.searches.values():
        arms.setdefault(search.arm.name, []).append(search)
    shown = dict(list(arms.items())[:max_arms])

    def counts(status: str) -> list[str]:
        return [str(sum(search.count(status) for search in searches)) for searches in shown.values()]

    done = [
        f"{sum(one.num_finished() for one in searches)}/{sum(one.num_wanted() for one in searches)}"
        for searches in shown.values()
    ]
    bests = [lowest(search.best() for search in searches) for searches in shown.values()]
    cells = {
        "arm": list(shown),
        "done": done,
        "running": [str(sum(trial.arm == name for trial in running)) for name in shown],
        "diverged": counts(Status.DIVERGED),
        "spent": counts(Status.BUDGET_SPENT),
        "failed": counts(Status.FAILED),
        "best": ["-" if best is None else f"{best:,}" for best in bests],
    }
    columns = [Column(heading, of_arms, NARROW) for heading, of_arms in cells.items()]
    table = terminal_table(columns, NARROW_WIDTH, one_line_each=max_arms is not None)
    if len(arms) > len(shown):
        table.add_row(f"and {len(arms) - len(shown)} more")
    return table


def describe(search: Search, index: int) -> str:
    """How a trial ended, in a few words."""
    summary = search.summaries.get(index, {})
    status = str(summary.get("status", "not begun"))
    if status == Status.REACHED:
        return f"reached after {summary['to_target']['fresh_examples']:,} fresh examples"
    if status == Status.FAILED:
        return f"failed ({summary.get('error', 'without a word')})"
    if status in (Status.BUDGET_SPENT, Status.PRUNED):
        best = summary.get("best")
        text = (
            f"missed the target ({status})" if summary.get("target", {}).get("value") is not None else status
        )
        return f"{text}, best {best['metric']} {best['value']:.4g}" if best else text
    return status
