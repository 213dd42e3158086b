"""From a plan and its proposals to one packed forward, and from its logits to the tokens kept.

Owns the correspondence between chunks and rows, and the cut at a stop token, `max_tokens` or the
end of the context. Moves no state: what it returns is committed by the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from itertools import islice

import msgspec

from engine.messages import FinishReason, TokenLogprobs
from engine.model.draws import Draws
from engine.model.runner import ModelOutput
from engine.sampling.device_draws import DeviceDraws, Drawn
from engine.sampling.logits import RowContext
from engine.sampling.logprobs import token_logprobs
from engine.sampling.plain import UNSURE, Rows
from engine.scheduling.constraint import Constraint
from engine.scheduling.segment import Segment
from engine.scheduling.sequence import Sequence
from engine.scheduling.step_plan import Chunk, StepPlan
from engine.speculation.proposal import Proposal
from engine.speculation.verify import VerifyResult, walk

NOT_FINITE = "the model's logits were not finite numbers; nothing can be sampled from them"
NOTHING_LEFT = (
    "nothing is left to sample: the other fields of the request rule out all that its grammar"
    " allows here, or the model's logits were not finite numbers"
)


class Sampled(msgspec.Struct):
    """One sampling chunk on its way through a step. `row` is its root row in the logits."""

    chunk: Chunk
    proposal: Proposal
    row: int
    tokens: list[int] = []  # kept: accepted drafts, then the new token
    drawn: list[int] = []  # the target's token at the root, then at each node
    path: list[int] = []  # accepted nodes, in order
    num_accepted: int = 0  # kept tokens that were guessed
    logprobs: list[TokenLogprobs] | None = None
    finish: FinishReason | None = None
    stop_token: int | None = None
    error: str | None = None
    bad_request: bool = False  # as in Output

    @property
    def rows(self) -> list[int]:
        """Where among its rows the kept tokens were drawn: at the root, then at nodes."""
        return [0, *(1 + node for node in self.path)][: len(self.tokens)]


def prompt_rows(chunk: Chunk) -> int:
    """Committed rows of the chunk whose logits are wanted for prompt log-probabilities: all of
    them, on the way through the prompt for the first time."""
    seq = chunk.seq
    if seq.params.prompt_logprobs is None or seq.num_output:
        return 0
    return chunk.length


def segments(plan: StepPlan, proposals: list[Proposal]) -> list[Segment]:
    """What the target computes in this step: each chunk's tokens, then its proposal's nodes."""
    packed = []
    for chunk, proposal in zip(plan.chunks, proposals, strict=True):
        seq, start, length, _ = chunk
        guesses, end = proposal.tokens, start + length
        committed = max(prompt_rows(chunk), int(end == len(seq.tokens)))
        packed.append(
            Segment(
                seq.tokens[start:end] + guesses,
                start,
                seq.blocks,
                committed + len(guesses),
                proposal.branches,
            )
        )
    return packed


class Acceptor:
    """`eos_ids` stop a sequence unless it asked to ignore them; `room` says how many tokens it may
    still grow; where `draws` are unsure, `exact` are not."""

    def __init__(
        self,
        draws: Draws,
        exact: DeviceDraws,
        *,
        eos_ids: Collection[int],
        room: Callable[[Sequence], int],
    ) -> None:
        self._draws = draws
        self._exact = exact
        self._eos_ids = frozenset(eos_ids)
        self._room = room

    def accept(
        self, plan: StepPlan, proposals: list[Proposal], output: ModelOutput, *, every: bool = False
    ) -> list[Sampled]:
        """Draw the target's token at each row, then walk each proposal along those draws. Behind a
        wrong guess there may be none, unless `every` one is wanted."""
        sampled: list[Sampled] = []
        row = 0
        for chunk, proposal in zip(plan.chunks, proposals, strict=True):
            samples = chunk.samples
            if wanted := prompt_rows(chunk):
                _record_prompt_logprobs(chunk, output, row)
                row += wanted - samples
            if samples:
                sampled.append(Sampled(chunk, proposal, row))
                row += 1 + len(proposal.tokens)
        if sampled:
            self.walk(sampled, output, self._quick(sampled, output, every))
        return sampled

    def walk(self, sampled: list[Sampled], output: ModelOutput, drawn: Seq[Drawn]) -> None:
        """Along what was `drawn` at each one's rows; where nothing was, it is the long way."""
        left = [item for item, own in zip(sampled, drawn, strict=True) if own.tokens is None]
        found = iter(self._slow(left, output) if left else ())
        for item, own in zip(sampled, drawn, strict=True):
            result = next(found) if own.tokens is None else walk(item.proposal, own.tokens)
            constraint = item.chunk.seq.constraint
            if constraint is not None and constraint.error:
                item.finish, item.error, item.bad_request = "error", constraint.error, True
            elif result.tokens:
                self._keep(item, result)
                item.logprobs = own.logprobs and [own.logprobs[i] for i in item.rows]
            else:
                sentence = NOT_FINITE if constraint is None else NOTHING_LEFT
                item.finish, item.error = "error", sentence
                item.bad_request = constraint is not None
        _record_logprobs(sampled, output)

    def _quick(self, sampled: list[Sampled], output: ModelOutput, every: bool) -> list[Drawn]:
        """By item, what is drawn at its rows, if that is no matter of the long way."""
        asked = [_rows(item) for item in sampled]
        if isinstance(self._draws, DeviceDraws):
            return self._draws.draw(output.logits, asked)
        if every:
            asked = [rows._replace(guesses=()) for rows in asked]
        return [Drawn(tokens) for tokens in self._draws.draw(output.table, asked)]

    def _slow(self, sampled: list[Sampled], output: ModelOutput) -> list[VerifyResult]:
        """Each proposal along the tokens drawn at its rows."""
        rows = [row for s in sampled for row in range(s.row, s.row + 1 + len(s.proposal))]
        contexts = [context for item in sampled for context in _contexts(item)]
        drawn = self._draws.draw_adjusted(output.take(rows).logits, contexts)
        if unsure := [i for i, token in enumerate(drawn) if token == UNSURE]:
            logits = output.take([rows[i] for i in unsure]).logits
            exact = self._exact.draw_adjusted(logits, [contexts[i] for i in unsure])
            for i, token in zip(unsure, exact, strict=True):
                drawn[i] = token
        left = iter(drawn)
        return [walk(item.proposal, list(islice(left, 1 + len(item.proposal)))) for item in sampled]

    def _keep(self, item: Sampled, result: VerifyResult) -> None:
        """Cut at the first stop token, where the grammar is complete or cannot go on, and where the
        sequence may grow no further."""
        seq = item.chunk.seq
        room = self._room(seq)
        item.drawn, item.path = result.drawn, result.path
        tokens = result.tokens if len(result.tokens) <= room else result.tokens[:room]
        size, item.finish, item.stop_token = self.cut(seq, tokens)
        item.tokens = tokens[:size]
        item.num_accepted = size if size < len(item.path) else len(item.path)
        if item.finish is None and size == room:
            item.finish = "length"

    def cut(self, seq: Sequence, tokens: list[int]) -> tuple[int, FinishReason | None, int | None]:
        """How many of the tokens that come next belong to the text, what ended it with them, and
        the stop token, if that was one. The grammar is led through them."""
        params, constraint = seq.params, seq.constraint
        eos_ids = frozenset() if params.ignore_eos else self._eos_ids
        if constraint is None and not params.stop_token_ids and eos_ids.isdisjoint(tokens):
            return len(tokens), None, None
        for i, token in enumerate(tokens, 1):
            if token in eos_ids or token in params.stop_token_ids:
                return i, "stop", token
            if constraint is not None and _ends(constraint, token):
                # Of an error the next step tells, as it would without guesses.
                return i, None if constraint.error else "stop", None
        return len(tokens), None, None


def _ends(constraint: Constraint, token: int) -> bool:
    """Whether the text that goes on with `token` is complete, or can have no next token."""
    constraint.extend(token)
    return constraint.is_complete(()) or constraint.error is not None


def _rows(item: Sampled) -> Rows:
    seq, guesses = item.chunk.seq, item.proposal.tokens
    size, position = 1 + len(guesses), len(seq.tokens)
    return Rows(seq, item.row, size, position, guesses, item.proposal.branches)


def _contexts(item: Sampled) -> list[RowContext]:
    """One per row: the root's, then each node's with its path through the proposal."""
    seq, proposal = item.chunk.seq, item.proposal
    contexts = [RowContext(seq, [])]
    paths: list[list[int]] = []
    for token, parent in zip(proposal.tokens, proposal.parents, strict=True):
        paths.append([*(paths[parent] if parent >= 0 else ()), token])
        contexts.append(RowContext(seq, paths[-1]))
    return contexts


def _record_logprobs(sampled: list[Sampled], output: ModelOutput) -> None:
    """Raw log-probabilities of every kept token that asked for them and has none yet, in one
    call."""
    asked = [s for s in sampled if s.chunk.seq.params.logprobs is not None and s.tokens]
    asked = [item for item in asked if item.logprobs is None]
    if not asked:
        return
    rows, tokens, counts = [], [], []
    for item in asked:
        rows += [item.row + row for row in item.rows]
        tokens += item.tokens
        counts += [item.chunk.seq.params.logprobs or 0] * len(item.tokens)
    found = iter(token_logprobs(output.logits, rows, tokens, counts))
    for item in asked:
        item.logprobs = [next(found) for _ in item.tokens]


def _record_prompt_logprobs(chunk: Chunk, output: ModelOutput, row: int) -> None:
    """The row at position p scores the prompt token at p+1; the first token has no score."""
    seq = chunk.seq
    if chunk.start == 0:
        seq.prompt_logprobs = [None]
    targets = seq.tokens[chunk.start + 1 : min(chunk.end + 1, seq.num_prompt)]
    count = seq.params.prompt_logprobs or 0
    rows = list(range(row, row + len(targets)))
    seq.prompt_logprobs += token_logprobs(output.logits, rows, targets, [count] * len(targets))
