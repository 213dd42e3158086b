"""The measurement: slices of the prompts under the contenders in turn, while the time lasts.

A cell is a number of requests at a time and a temperature group. A slice is the next few prompts of
a cell: one at one request at a time, else as many as run at once, or twice as many. All contenders
of a slice run the same prompts, in rotating order, so that ratios are of neighbours in time; K = 0
runs twice. First each cell gets its due (one slice, at one request at a time one for each kind of
text), with replies as long as the time allows; then the cell that is furthest behind is next, until
every prompt was in every cell or the time is up. From a cell's second slice on only the promising
take part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Protocol

import msgspec

from engine.lab.evaluate_messages import Batch, Mode, Ran, Weigh
from server.lab.evaluate.findings import (
    PLAIN,
    Cell,
    Contender,
    Difference,
    Findings,
    Prompt,
    Record,
    known,
)
from server.lab.evaluate.progress import Progress, cut_of
from server.lab.evaluate.prompts import PromptsError
from server.lab.evaluate.tasks import Task, by_turns

SHORTEST = 16  # tokens of a reply, however little time there is
SLACK = 0.8  # of the time: guesses may be slower, and what is last must not be short
NOISY = 1.2  # K = 0 against itself
LONG = 64  # tokens of a reply from which on a slice is worth doubling
MAX_DIFFERENCES = 5  # that are looked into
PROMISING = 4  # contenders, by the slices so far, besides K = 0 and what is configured

CONFIGURED = Mode("auto")

Clock = Callable[[], float]
Say = Callable[[str], object]
Decode = Callable[[Sequence[int]], str]


class Lab(Protocol):
    """The engine, as `child.Child` is."""

    def run(self, batch: Batch) -> Ran: ...

    def weigh(self, weigh: Weigh) -> float | None: ...


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
        self._plain: dict[int, tuple[int, int, list[int]]] = {}  # load, limit, text of K = 0
        self._cells = {
            Cell(greedy, load): Progress(found, due=len({t.kind for t in found if load == 1}) or 1)
            for load in loads
            for greedy in (True, False)
            if (found := by_turns([task for task in tasks if task.greedy == greedy]))
        }

    def run(self) -> None:
        """Fills the findings. Raises PromptsError for what the engine refuses."""
        self._batch([self._tasks[0].shortened(SHORTEST)], Mode("off"), 1)  # compiles, once
        while (cell := self._next()) is not None:
            began = self._clock()
            self._slice(cell, self._cells[cell])
            self._cells[cell].last_seconds = self._clock() - began
        self._finish()

    def _finish(self) -> None:
        self._findings.cut = cut = cut_of(self._cells.values(), self._seconds)
        if cut is not None:
            self._findings.notes.append(
                f"replies were cut, down to {cut.tokens} tokens, to look at every load"
                " in the time given"
            )
        if any(not 1 / NOISY < ratio < NOISY for ratio in self._findings.repeats):
            self._findings.notes.append(
                "the machine was busy: K=0 was far from itself, so the figures are rough; run it"
                " again when it is idle"
            )
        for task in self._tasks:
            self._findings.prompts.append(
                Prompt(
                    line=task.entry.line,
                    id=task.entry.id,
                    kind=task.kind,
                    title=task.title,
                    temperature=task.submit.params.temperature,
                    prompt_tokens=len(task.submit.prompt),
                    reply=task.reply,
                )
            )

    def _next(self) -> Cell | None:
        due = [cell for cell, progress in self._cells.items() if progress.slices < progress.due]
        fresh = [cell for cell in due if not self._cells[cell].slices]
        if fresh:
            return min(fresh, key=lambda cell: cell.load)
        now = self._clock()
        possible = [
            cell
            for cell, progress in self._cells.items()
            if progress.share < 1 and now + progress.last_seconds <= self._deadline
        ]
        first = [cell for cell in due if cell in possible] or possible
        return min(first, key=lambda cell: self._cells[cell].share, default=None)

    def _slice(self, cell: Cell, progress: Progress) -> None:
        contenders = self._promising(cell)
        if not progress.limit:
            progress.limit = self._affordable(cell, progress, len(contenders))
        double = cell.load > 1 and progress.limit >= LONG and len(progress.tasks) > cell.load
        tasks = [
            self._ended(task).shortened(progress.limit)
            for task in progress.next(cell.load * (1 + double))
        ]
        turn = progress.slices % len(contenders)
        ran: dict[str, Ran] = {}
        for contender in [*contenders[turn:], *contenders[:turn]]:
            ran[contender.name] = self._batch(tasks, contender.mode, cell.load)
        plain = self._repeated(tasks, cell.load, ran[PLAIN])
        progress.served += len(tasks)
        progress.slices += 1
        for contender in contenders:
            self._note(cell, tasks, contender, ran[contender.name], plain)
        self._compare_loads(cell, tasks, plain, progress.limit)
        self._tell(cell, progress)

    def _repeated(self, tasks: Sequence[Task], load: int, first: Ran) -> Ran:
        """K = 0 once more, at the end: what all are compared with is the mean, and how much the
        two differ says how much any figure of this slice may be off."""
        second = self._batch(tasks, Mode("off"), load)
        if first.seconds and second.seconds:
            self._findings.repeats.append(first.seconds / second.seconds)
        self._findings.cpu_time |= second.cpu_time
        return msgspec.structs.replace(first, seconds=(first.seconds + second.seconds) / 2)

    def _tell(self, cell: Cell, progress: Progress) -> None:
        records = self._findings.cells[cell]
        fastest = max(records, key=lambda name: known(records[name].ratio))
        left = max(0.0, self._deadline - self._clock())
        self._say(
            f"{cell.group}, {cell.load} at a time:"
            f" {min(progress.served, len(progress.tasks))} of {len(progress.tasks)} prompts,"
            f" {progress.limit} tokens; {fastest} {records[fastest].ratio:.2f}x; {left:.0f} s left"
        )

    def _promising(self, cell: Cell) -> list[Contender]:
        """All, until there is a record; then K = 0, the configured one, the fastest, and at one
        request at a time those that acceptance by position is read from."""
        everyone, records = self._findings.contenders, self._findings.cells.get(cell)
        if records is None:
            return everyone
        ranked = sorted(everyone, key=lambda c: -known(records[c.name].ratio))
        kept = {PLAIN, *(contender.name for contender in ranked[:PROMISING])}
        kept |= {c.name for c in everyone if c.mode == CONFIGURED or (c.deep and cell.load == 1)}
        return [contender for contender in everyone if contender.name in kept]

    def _affordable(self, cell: Cell, progress: Progress, contenders: int) -> int:
        """Tokens of a reply, so that every slice that is due still gets its share of the time. By
        the speed of a short plain run, which warms up, too."""
        tasks = [task.shortened(SHORTEST) for task in progress.next(cell.load)]
        began = self._clock()
        ran = self._batch(tasks, Mode("off"), cell.load)
        rate = max(sum(map(len, ran.texts)), 1) / max(self._clock() - began, 1e-9)
        due = sum(max(p.due - p.slices, 0) for p in self._cells.values())
        seconds = max(self._deadline - self._clock(), 0.0) / due
        runs = len(tasks) * (contenders + 1)
        progress.fitting = SLACK * seconds * rate / runs
        return min(max(SHORTEST, int(progress.fitting)), progress.longest)

    def _ended(self, task: Task) -> Task:
        """The task, known to end at its stop string if plain decoding comes to one."""
        if task.stops and not task.settled:
            [text] = self._batch([task], Mode("off"), 1).texts
            task.settle(text)
        return task

    def _batch(self, tasks: Sequence[Task], mode: Mode, load: int) -> Ran:
        ran = self._lab.run(Batch(mode, [task.submit for task in tasks], load))
        for place, sentence in ran.errors.items():
            line = tasks[place].entry.line
            raise PromptsError(f"{self._path}, line {line}: {sentence}")
        return ran

    def _note(
        self, cell: Cell, tasks: Sequence[Task], contender: Contender, ran: Ran, plain: Ran
    ) -> None:
        findings, name = self._findings, contender.name
        findings.cells.setdefault(cell, {}).setdefault(name, Record()).add(ran, plain)
        if cell.load == 1:
            kind = findings.by_kind.setdefault((tasks[0].kind, cell.greedy), {})
            kind.setdefault(name, Record()).add(ran, plain)
        if name == PLAIN:
            return
        for task, text, expected in zip(tasks, ran.texts, plain.texts, strict=True):
            same = text == expected
            findings.compared[name] = findings.compared.get(name, 0) + 1
            findings.equal[name] = findings.equal.get(name, 0) + same
            if not same and self._is_news(task):
                findings.differences.append(self._look(cell, task, contender, expected, text))

    def _is_news(self, task: Task) -> bool:
        """One difference of a prompt is enough to look into."""
        known = {(d.line, d.temperature) for d in self._findings.differences}
        return (
            len(known) < MAX_DIFFERENCES
            and (task.entry.line, task.submit.params.temperature) not in known
        )

    def _compare_loads(self, cell: Cell, tasks: Sequence[Task], ran: Ran, limit: int) -> None:
        """Whether the number of requests at a time changed a text of plain decoding."""
        compared, equal = self._findings.batched
        for task, text in zip(tasks, ran.texts, strict=True):
            own = self._tasks[task.number]
            own.reply = max(own.reply or 0, len(text))
            load, known, first = self._plain.setdefault(task.number, (cell.load, limit, text))
            if load != cell.load:
                size = min(limit, known)
                compared += 1
                equal += text[:size] == first[:size]
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
