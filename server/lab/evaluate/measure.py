"""The measurement: slices of the prompts under the contenders in turn, while the time lasts.

A slice is the next few prompts of a cell: as many as run at once, or twice as many. All contenders
of a slice run the same prompts, in rotating order, so that ratios are of neighbours in time; K = 0
runs twice. First each cell gets the slices it is due (one, at one request at a time one for each
kind of text), with replies as long as the time allows; then the cell that is furthest behind is
next, until every prompt was in every cell or the time is up. From a cell's second slice on only the
promising take part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Protocol

import msgspec

from engine.lab.evaluate_messages import Batch, CompareTokens, Mode, Ran
from server.lab.evaluate.contenders import PLAIN, Contender
from server.lab.evaluate.findings import TELLING, Cell, Cut, Difference, Findings, Prompt
from server.lab.evaluate.prompts import PromptsError
from server.lab.evaluate.tasks import Task

SHORTEST = 16  # tokens of a reply, however little time there is
SLACK = 0.8  # of the time: speculation may be slower, and what is last must not be short
NOISY = 1.2  # K = 0 against itself
LONG = 64  # tokens of a reply from which on a slice is worth doubling
MAX_DIFFERENCES = 5  # that are looked into
PROMISING = 4  # contenders, by the slices so far, besides K = 0 and what is configured

OFF, CONFIGURED = Mode("off"), Mode("auto")


class Lab(Protocol):
    """The engine, as `child.Child` is."""

    def run(self, batch: Batch) -> Ran: ...

    def margin(self, tokens: CompareTokens) -> float | None: ...


@dataclass(slots=True)
class Progress:
    """Of one cell: `served` tasks in `slices` of those that it is `due`. `limit`: tokens of a
    reply, 0 before the first slice; `fitting`: that there was time for."""

    tasks: list[Task]
    due: int
    limit: int = 0
    fitting: float = math.inf
    served: int = 0
    slices: int = 0
    last_seconds: float = 0.0

    @property
    def longest(self) -> int:
        """Tokens of a reply that is not cut."""
        return max(task.submit.params.max_tokens for task in self.tasks)

    @property
    def share(self) -> float:
        return self.served / len(self.tasks)

    def next(self, size: int) -> list[Task]:
        return [self.tasks[(self.served + i) % len(self.tasks)] for i in range(size)]


class Measurement:
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
        decode: Callable[[Sequence[int]], str],
        clock: Callable[[], float],
        say: Callable[[str], object],
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
        self._plain: dict[int, tuple[int, int, list[int]]] = {}  # load, limit, text of K = 0
        self._cells = {
            Cell(greedy, load): Progress(
                found, due=len({t.kind for t in found}) if load == 1 else 1
            )
            for load in loads
            for greedy in (True, False)
            if (found := by_turns([task for task in tasks if task.greedy == greedy]))
        }

    def run(self) -> None:
        """Fills the findings. Raises PromptsError for what the engine refuses."""
        self._batch([self._tasks[0].shortened(SHORTEST)], OFF, 1)  # compiles, once
        while (cell := self._next()) is not None:
            began = self._clock()
            self._slice(cell, self._cells[cell])
            self._cells[cell].last_seconds = self._clock() - began
        self._finish()

    def _finish(self) -> None:
        findings = self._findings
        findings.cut = cut = self._cut()
        if cut is not None:
            findings.notes.append(
                f"replies were cut, down to {cut.tokens} tokens, to look at every load"
                " in the time given"
            )
        if any(not 1 / NOISY < ratio < NOISY for ratio in findings.repeats):
            findings.notes.append(
                "the machine was busy: K=0 was far from itself, so the figures are rough; run it"
                " again when it is idle"
            )
        for task in self._tasks:
            entry, submit = task.entry, task.submit
            temperature, length = submit.params.temperature, len(submit.prompt)
            findings.prompts.append(
                Prompt(entry.line, entry.id, task.kind, task.title, temperature, length, task.reply)
            )

    def _cut(self) -> Cut | None:
        """By the cell that lacks most."""
        cut = [p for p in self._cells.values() if p.limit < p.longest]
        if not cut:
            return None
        more = max(min(TELLING, p.longest) / max(p.fitting, 1.0) for p in cut)
        return Cut(min(p.limit for p in cut), math.ceil(self._seconds / 60 * more))

    def _next(self) -> Cell | None:
        """Cells without a slice by load, then those that are due more, then the furthest behind."""
        cells, now = self._cells, self._clock()
        fresh = [cell for cell, progress in cells.items() if not progress.slices]
        if fresh:
            return min(fresh, key=lambda cell: cell.load)
        possible = [
            cell
            for cell, progress in cells.items()
            if progress.share < 1 and now + progress.last_seconds <= self._deadline
        ]
        return min(
            possible,
            key=lambda cell: (cells[cell].slices >= cells[cell].due, cells[cell].share),
            default=None,
        )

    def _slice(self, cell: Cell, progress: Progress) -> None:
        contenders = self._promising(cell)
        if not progress.limit:
            progress.limit = self._affordable(cell, progress, len(contenders))
        double = cell.load > 1 and progress.limit >= LONG and len(progress.tasks) > cell.load
        size = 2 * cell.load if double else cell.load
        tasks = [self._settled(task).shortened(progress.limit) for task in progress.next(size)]
        turn = progress.slices % len(contenders)
        ran = {
            contender.name: self._batch(tasks, contender.mode, cell.load)
            for contender in [*contenders[turn:], *contenders[:turn]]
        }
        plain = self._repeated(tasks, cell.load, ran[PLAIN])
        progress.served += len(tasks)
        progress.slices += 1
        for contender in contenders:
            self._findings.add(cell, tasks[0].kind, contender, ran[contender.name], plain)
            if contender.name != PLAIN:
                self._compare(cell, tasks, contender, ran[contender.name], plain)
        self._compare_loads(cell, tasks, plain, progress.limit)
        self._report(cell, progress)

    def _repeated(self, tasks: Sequence[Task], load: int, first: Ran) -> Ran:
        """K = 0 once more, at the end: what all are compared with is the mean, and how much the
        two differ says how much any figure of this slice may be off."""
        second = self._batch(tasks, OFF, load)
        if first.seconds and second.seconds:
            self._findings.repeats.append(first.seconds / second.seconds)
        self._findings.cpu_time |= second.cpu_time
        return msgspec.structs.replace(first, seconds=(first.seconds + second.seconds) / 2)

    def _report(self, cell: Cell, progress: Progress) -> None:
        records, size = self._findings.cells[cell], len(progress.tasks)
        fastest = max(records, key=lambda name: records[name].rank)
        left = max(0.0, self._deadline - self._clock())
        self._say(
            f"{cell.group}, {cell.load} at a time: {min(progress.served, size)} of {size} prompts,"
            f" {progress.limit} tokens; {fastest} {records[fastest].ratio:.2f}x; {left:.0f} s left"
        )

    def _promising(self, cell: Cell) -> list[Contender]:
        """All, until there is a record; then K = 0, the configured one, the fastest, and at one
        request at a time those that acceptance by position is read from."""
        everyone, records = self._findings.contenders, self._findings.cells.get(cell)
        if records is None:
            return everyone
        ranked = sorted(everyone, key=lambda c: -records[c.name].rank)
        fastest = ranked[:PROMISING]
        return [
            c
            for c in everyone
            if c.name == PLAIN or c in fastest or c.mode == CONFIGURED
            or (c.deep and cell.load == 1)
        ]  # fmt: skip

    def _affordable(self, cell: Cell, progress: Progress, contenders: int) -> int:
        """Tokens of a reply, so that every slice that is due still gets its share of the time. By
        the speed of a short plain run, which warms up, too."""
        tasks = [task.shortened(SHORTEST) for task in progress.next(cell.load)]
        began = self._clock()
        ran = self._batch(tasks, OFF, cell.load)
        rate = max(sum(map(len, ran.texts)), 1) / max(self._clock() - began, 1e-9)
        due = sum(max(p.due - p.slices, 0) for p in self._cells.values())
        seconds = max(self._deadline - self._clock(), 0.0) / due
        progress.fitting = SLACK * seconds * rate / (len(tasks) * (contenders + 1))
        return min(max(SHORTEST, int(progress.fitting)), progress.longest)

    def _settled(self, task: Task) -> Task:
        """The task, known to end at its stop string if plain decoding comes to one."""
        if task.unsettled:
            [text] = self._batch([task], OFF, 1).texts
            task.settle(text)
        return task

    def _batch(self, tasks: Sequence[Task], mode: Mode, load: int) -> Ran:
        ran = self._lab.run(Batch(mode, [task.submit for task in tasks], load))
        for place, sentence in ran.errors.items():
            line = tasks[place].entry.line
            raise PromptsError(f"{self._path}, line {line}: {sentence}")
        return ran

    def _compare(
        self, cell: Cell, tasks: Sequence[Task], contender: Contender, ran: Ran, plain: Ran
    ) -> None:
        """Texts with those of K = 0. One difference of a prompt is enough to look into."""
        findings = self._findings
        for task, got, expected in zip(tasks, ran.texts, plain.texts, strict=True):
            findings.compared[contender.name] += 1
            findings.equal[contender.name] += got == expected
            found = {(d.line, d.temperature) for d in findings.differences}
            place = task.entry.line, task.submit.params.temperature
            if got != expected and len(found) < MAX_DIFFERENCES and place not in found:
                findings.differences.append(self._look(cell, task, contender, expected, got))

    def _compare_loads(self, cell: Cell, tasks: Sequence[Task], ran: Ran, limit: int) -> None:
        """Whether the number of requests at a time changed a text of plain decoding."""
        compared, equal = self._findings.batched
        for task, text in zip(tasks, ran.texts, strict=True):
            own = self._tasks[task.number]
            own.reply = max(own.reply or 0, len(text))
            load, known, first = self._plain.setdefault(task.number, (cell.load, limit, text))
            if load != cell.load:
                compared += 1
                size = min(limit, known)
                equal += text[:size] == first[:size]
        self._findings.batched = compared, equal

    def _look(
        self, cell: Cell, task: Task, contender: Contender, expected: list[int], got: list[int]
    ) -> Difference:
        pairs = zip_longest(expected, got)
        at = next(i for i, (one, other) in enumerate(pairs) if one != other)
        margin = None
        if at < len(expected) and at < len(got):
            margin = self._lab.margin(CompareTokens(task.submit, at, expected[at], got[at]))
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


def by_turns(tasks: Sequence[Task]) -> list[Task]:
    """Kinds of text in turn, so that a few prompts are of all kinds."""
    kinds: dict[str, list[Task]] = {}
    for task in tasks:
        kinds.setdefault(task.kind, []).append(task)
    return [task for some in zip_longest(*kinds.values()) for task in some if task is not None]
