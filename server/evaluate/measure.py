"""The measurement: slices of the prompts under every contender in turn, while the time lasts.

A cell is a number of requests at a time and a temperature group. A slice is the next few prompts of
a cell: one at one request at a time, else twice as many as run at once, where there are so many.
Every contender runs every slice, in rotating order, so that ratios are of neighbours in time. Each
cell gets one slice however long it takes; then the cell that is furthest behind is next, until each
prompt was in each cell or the time is up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Protocol

from engine.evaluate_messages import Batch, Mode, Ran, Weigh
from server.evaluate.findings import PLAIN, Cell, Contender, Difference, Findings, Prompt, Record
from server.evaluate.prompts import PromptsError
from server.evaluate.tasks import Task

SHORTEST = 16  # tokens of a reply, however little time there is
MAX_DIFFERENCES = 5  # that are looked into
SLACK = 0.8  # of the time, that the first slices may take by the estimate

Clock = Callable[[], float]
Say = Callable[[str], object]
Decode = Callable[[Sequence[int]], str]


class Lab(Protocol):
    """The engine, as `child.Child` is."""

    def run(self, batch: Batch) -> Ran: ...

    def weigh(self, weigh: Weigh) -> float | None: ...


@dataclass(slots=True)
class _Progress:
    """Of one cell: how many of its tasks were served, in how many slices."""

    tasks: list[Task]
    served: int = 0
    slices: int = 0
    last_seconds: float = 0.0

    def size(self, load: int) -> int:
        return 1 if load == 1 else min(2 * load, max(load, len(self.tasks)))

    @property
    def share(self) -> float:
        return self.served / len(self.tasks)


class Evaluation:
    """`run` once. `clock` in seconds; `path` is of the prompts, for sentences about them."""

    def __init__(
        self,
        lab: Lab,
        tasks: Sequence[Task],
        findings: Findings,
        *,
        loads: Sequence[int],
        seconds: float,
        path: str,
        decode: Decode,
        clock: Clock,
        say: Say,
    ) -> None:
        self._lab = lab
        self._tasks = tasks
        self._findings = findings
        self._path = path
        self._decode = decode
        self._clock = clock
        self._say = say
        self._seconds = seconds
        self._deadline = clock() + seconds
        self._made: dict[int, tuple[int, list[int]]] = {}  # load and text of the first plain run
        self._cells = {
            Cell(greedy, load): _Progress(found)
            for load in loads
            for greedy in (True, False)
            if (found := [task for task in tasks if task.greedy == greedy])
        }

    def run(self) -> None:
        """Fills the findings. Raises PromptsError for what the engine refuses."""
        self._shorten()
        while (cell := self._next()) is not None:
            began = self._clock()
            self._slice(cell, self._cells[cell])
            self._cells[cell].last_seconds = self._clock() - began
        for task in self._tasks:
            reply = None if task.reply is None else len(task.reply)
            params = task.submit.params
            self._findings.prompts.append(
                Prompt(
                    task.entry.line, task.entry.id, task.kind, task.title, params.temperature,
                    len(task.submit.prompt), reply,
                )
            )  # fmt: skip

    def _shorten(self) -> None:
        """Make replies as short as the time demands, by the speed of the first prompt."""
        first = self._tasks[0].shortened(SHORTEST)
        self._plain([first], 1)  # reads the weights, compiles, once
        ran = self._plain([first], 1)
        each = ran.seconds / max(len(ran.texts[0]), 1)
        runs = 1 + len(self._findings.contenders)
        rounds = sum(
            progress.size(cell.load) / math.sqrt(cell.load)
            for cell, progress in self._cells.items()
        )
        fitting = int(SLACK * self._seconds / (each * runs * rounds))
        longest = max(task.submit.params.max_tokens for task in self._tasks)
        fitting = max(SHORTEST, fitting)
        if fitting < longest:
            self._findings.notes.append(
                f"replies are cut at {fitting} tokens, to look at every load in the time given"
            )
            for task in self._tasks:
                task.limit(fitting)
        tokens = min(fitting, longest)
        self._say(
            f"about {1 / each:.0f} tokens/s without guesses; replies of up to {tokens} tokens"
        )

    def _next(self) -> Cell | None:
        fresh = [cell for cell, progress in self._cells.items() if not progress.slices]
        if fresh:
            return min(fresh, key=lambda cell: cell.load)
        now = self._clock()
        open_cells = [
            cell
            for cell, progress in self._cells.items()
            if progress.share < 1 and now + progress.last_seconds <= self._deadline
        ]
        return min(open_cells, key=lambda cell: self._cells[cell].share, default=None)

    def _slice(self, cell: Cell, progress: _Progress) -> None:
        size, tasks = progress.size(cell.load), progress.tasks
        chosen = [tasks[(progress.served + i) % len(tasks)] for i in range(size)]
        self._settle(chosen, cell.load)
        contenders = self._findings.contenders
        turn = progress.slices % len(contenders)
        ran: dict[str, Ran] = {}
        for contender in [*contenders[turn:], *contenders[:turn]]:
            ran[contender.name] = self._batch(chosen, contender.mode, cell.load)
        progress.served += size
        progress.slices += 1
        for contender in contenders:
            self._note(cell, chosen, contender, ran[contender.name], ran[PLAIN])
        left = max(0.0, self._deadline - self._clock())
        self._say(
            f"{cell.group}, {cell.load} at a time: {min(progress.served, len(tasks))} of"
            f" {len(tasks)} prompts; {left:.0f} s left"
        )

    def _settle(self, tasks: Sequence[Task], load: int) -> None:
        """Plain replies of tasks that have none yet: where a stop string ends them, what they are
        at another load, and a run to warm up with."""
        new = {task.number: task for task in tasks if task.reply is None}
        if new:
            texts = self._plain(list(new.values()), load).texts
            for task, text in zip(new.values(), texts, strict=True):
                task.settle(text)
                self._made[task.number] = load, task.reply or []

    def _plain(self, tasks: Sequence[Task], load: int) -> Ran:
        return self._batch(tasks, Mode("off"), load)

    def _batch(self, tasks: Sequence[Task], mode: Mode, load: int) -> Ran:
        ran = self._lab.run(Batch(mode, [task.submit for task in tasks], load))
        for place, sentence in ran.errors.items():
            line = tasks[place].entry.line
            raise PromptsError(f"{self._path}, line {line}: {sentence}")
        return ran

    def _note(
        self, cell: Cell, tasks: Sequence[Task], contender: Contender, ran: Ran, plain: Ran
    ) -> None:
        findings = self._findings
        findings.cells.setdefault(cell, {}).setdefault(contender.name, Record()).add(ran, plain)
        if cell.load == 1:
            key = tasks[0].kind, cell.greedy
            findings.by_kind.setdefault(key, {}).setdefault(contender.name, Record()).add(
                ran, plain
            )
        if contender.name == PLAIN:
            self._compare_loads(cell, tasks, ran)
            return
        for task, text, expected in zip(tasks, ran.texts, plain.texts, strict=True):
            same = text == expected
            name = contender.name
            findings.compared[name] = findings.compared.get(name, 0) + 1
            findings.equal[name] = findings.equal.get(name, 0) + same
            if not same and len(findings.differences) < MAX_DIFFERENCES:
                findings.differences.append(self._look(cell, task, contender, expected, text))

    def _compare_loads(self, cell: Cell, tasks: Sequence[Task], ran: Ran) -> None:
        """Whether the number of requests at a time changed a text of plain decoding."""
        compared, equal = self._findings.batched
        for task, text in zip(tasks, ran.texts, strict=True):
            load, first = self._made[task.number]
            if load != cell.load:
                compared += 1
                equal += text == first
        self._findings.batched = compared, equal

    def _look(
        self, cell: Cell, task: Task, contender: Contender, expected: list[int], got: list[int]
    ) -> Difference:
        pairs = zip_longest(expected, got)
        at = next(i for i, (one, other) in enumerate(pairs) if one != other)
        margin = None
        if at < len(expected) and at < len(got):
            margin = self._lab.weigh(Weigh(task.submit, at, expected[at], got[at]))
        return Difference(
            line=task.entry.line,
            contender=contender.name,
            load=cell.load,
            temperature=task.submit.params.temperature,
            at=at,
            before=self._decode(expected[max(0, at - 12) : at]),
            expected=self._decode(expected[at : at + 1]),
            got=self._decode(got[at : at + 1]),
            margin=margin,
        )
