"""How far the demo is: bars on a terminal, lines elsewhere."""

from __future__ import annotations

from collections import deque
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from thunderep.demo.train import Step


class Display:
    """Shows one activity after the other.

    Args:
        console: Where.
        tokens: Tokens in a training step, of all ranks.
    """

    def __init__(self, console: Console, tokens: int) -> None:
        self._tokens = tokens
        self._console = console
        self._recent: deque[float] = deque(maxlen=20)
        self._task: TaskID | None = None
        self._total = 0
        self._bars = Progress(
            TextColumn("{task.description:<34}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("{task.fields[figures]}"), console=console, disable=not console.is_terminal,
        )  # fmt: skip

    def begin(self, name: str, total: int | None = None) -> None:
        """End the activity before, and begin one of `total` steps, or of unknown length."""
        self.end()
        self._recent.clear()
        self._total = total or 0
        self._task = self._bars.add_task(name, total=total, figures="")
        self._line(name)

    def rename(self, name: str) -> None:
        """Give the activity another name."""
        if self._task is not None and self._bars.tasks[self._task].description != name:
            self._bars.update(self._task, description=name)
            self._line(name)

    def step(self, step: Step) -> None:
        """Show a training step."""
        if step.index:  # the first one may have compiled
            self._recent.append(step.seconds)
        figures = f"loss {step.loss:.3f}"
        if self._recent:
            figures += f"  {self._tokens * len(self._recent) / sum(self._recent):,.0f} tokens/s"
        if self._task is not None:
            self._bars.update(self._task, advance=1, figures=figures)
        if step.index % max(1, self._total // 10) == 0 or step.index + 1 == self._total:
            self._line(f"  step {step.index + 1}/{self._total}  {figures}")

    def end(self) -> None:
        """End the activity."""
        if self._task is not None and self._bars.tasks[self._task].total is None:
            self._bars.update(self._task, total=1, completed=1)
        self._task = None

    def _line(self, text: str) -> None:
        if not self._console.is_terminal:
            self._console.print(text)

    def __enter__(self) -> Display:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bars.stop()
