"""Builds one packed forward from a plan and its proposals, and turns its logits into kept tokens.

Owns the mapping between chunks and logit rows, and the cut at a stop token, `max_tokens` or the end
of the context. Changes no scheduler state: the scheduler commits what it returns.
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
from engine.sampling.plain import UNDECIDED, Rows
from engine.scheduling.constraint import Constraint
from engine.scheduling.segment import CHAIN, Segment
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
    """The state of one sampling chunk within a step. `row`: its root's row in the logits."""

    chunk: Chunk
    proposal: Proposal
    row: int
    tokens: list[int] = []  # kept: accepted draft tokens, then the new token
    drawn: list[int] = []  # the target's token at the root, then at each node
    path: list[int] = []  # accepted nodes, in order
    num_accepted: int = 0  # draft tokens among the kept tokens
    logprobs: list[TokenLogprobs] | None = None
    finish: FinishReason | None = None
    stop_token: int | None = None
    error: str | None = None
    bad_request: bool = False  # as in Output

    @property
    def rows(self) -> list[int]:
        """Return the row of each kept token, counted from `row`: 0 for the root, then 1 + node."""
        if self.proposal.branches is None:
            return CHAIN[1 : 1 + len(self.tokens)]
        return [0, *(1 + node for node in self.path)][: len(self.tokens)]


def prompt_rows(chunk: Chunk) -> int:
    """Return how many of the chunk's committed rows need logits for prompt log-probabilities: all
    while the prompt is computed for the first time, else 0."""
    return chunk.length if chunk.seq.is_scored else 0


def segments(chunks: Seq[Chunk], proposals: list[Proposal]) -> list[Segment]:
    """Return the target's work in this step: the tokens of each chunk, then its proposal's."""
    packed = []
    for chunk, proposal in zip(chunks, proposals, strict=True):
        seq, start, length, _ = chunk
        end, known = start + length, seq.tokens
        count = (prompt_rows(chunk) or int(end == len(known))) + len(proposal.tokens)
        tokens = known[start:end] + proposal.tokens
        packed.append(Segment(tokens, start, seq.blocks, count, proposal.branches))
    return packed


class Acceptor:
    """`eos_ids` end a sequence unless it ignores them; `room(seq)`: tokens it may still generate;
    `exact` redraws the rows for which `draws` returned UNDECIDED."""

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
        """Draw the target's token at each row, then walk each proposal along those draws. Rows
        after a rejected token may stay undrawn, unless `every` row is needed."""
        sampled: list[Sampled] = []
        row = 0
        for chunk, proposal in zip(plan.chunks, proposals, strict=True):
            samples = chunk.samples
            if count := prompt_rows(chunk):
                _record_prompt_logprobs(chunk, output, row)
                row += count - samples
            if samples:
                sampled.append(Sampled(chunk, proposal, row))
                row += 1 + len(proposal.tokens)
        if sampled:
            self.walk(sampled, output, self._quick(sampled, output, every))
        return sampled

    def walk(self, sampled: list[Sampled], output: ModelOutput, drawn: Seq[Drawn]) -> None:
        """Verify each proposal with its `drawn` tokens, or by the slow path if there are none."""
        both = [*zip(sampled, drawn, strict=True)]
        slow = [item for item, (tokens, _) in both if tokens is None]
        results = iter(self._slow(slow, output) if slow else ())
        for item, (tokens, logprobs) in both:
            result = next(results) if tokens is None else walk(item.proposal, tokens)
            constraint = item.chunk.seq.constraint
            if constraint is not None and constraint.error:
                item.finish, item.error, item.bad_request = "error", constraint.error, True
            elif result.tokens:
                self._keep(item, result)
                item.logprobs = logprobs and [logprobs[i] for i in item.rows]
            else:
                sentence = NOT_FINITE if constraint is None else NOTHING_LEFT
                item.finish, item.error = "error", sentence
                item.bad_request = constraint is not None
        _record_logprobs(sampled, output)

    def _quick(self, sampled: list[Sampled], output: ModelOutput, every: bool) -> list[Drawn]:
        """Return, by item, the tokens drawn at its rows; none if it needs the slow path."""
        batch = [_rows(item) for item in sampled]
        if isinstance(self._draws, DeviceDraws):
            return self._draws.draw(output.logits, batch)
        if every:
            batch = [rows._replace(draft_tokens=()) for rows in batch]
        return [Drawn(tokens) for tokens in self._draws.draw(output.table, batch)]

    def _slow(self, sampled: list[Sampled], output: ModelOutput) -> list[VerifyResult]:
        """Draw with penalties, grammars and other host work, then verify each proposal."""
        rows = [row for s in sampled for row in range(s.row, s.row + 1 + len(s.proposal))]
        contexts = [context for item in sampled for context in _contexts(item)]
        drawn = self._draws.draw_adjusted(output.take(rows).logits, contexts)
        if unsure := [i for i, token in enumerate(drawn) if token == UNDECIDED]:
            logits = output.take([rows[i] for i in unsure]).logits
            exact = self._exact.draw_adjusted(logits, [contexts[i] for i in unsure])
            for i, token in zip(unsure, exact, strict=True):
                drawn[i] = token
        rest = iter(drawn)
        return [walk(item.proposal, list(islice(rest, 1 + len(item.proposal)))) for item in sampled]

    def _keep(self, item: Sampled, result: VerifyResult) -> None:
        """Keep tokens up to the first stop token, the token after which the grammar is complete or
        allows no other, or the end of the sequence's room."""
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
        """Return how many of the next tokens belong to the text, why it ends with them (or None),
        and the stop token, if one ended it. Advances the grammar through them."""
        params, constraint = seq.params, seq.constraint
        eos_ids = frozenset() if params.ignore_eos else self._eos_ids
        if constraint is None and not params.stop_token_ids and eos_ids.isdisjoint(tokens):
            return len(tokens), None, None
        for i, token in enumerate(tokens, 1):
            if token in eos_ids or token in params.stop_token_ids:
                return i, "stop", token
            if constraint is not None and _advance(constraint, token):
                # The next step reports an error, as it does without speculation.
                return i, None if constraint.error else "stop", None
        return len(tokens), None, None


def _advance(constraint: Constraint, token: int) -> bool:
    """Advance the grammar; return whether the text is complete or can have no next token."""
    constraint.extend(token)
    return constraint.is_complete(()) or constraint.error is not None


def _rows(item: Sampled) -> Rows:
    seq, draft_tokens = item.chunk.seq, item.proposal.tokens
    size, position = 1 + len(draft_tokens), len(seq.tokens)
    return Rows(seq, item.row, size, position, draft_tokens, item.proposal.branches)


def _contexts(item: Sampled) -> list[RowContext]:
    """Return one context per row: the root's, then each node's with its path in the proposal."""
    seq, proposal = item.chunk.seq, item.proposal
    contexts = [RowContext(seq, [])]
    paths: list[list[int]] = []
    for token, parent in zip(proposal.tokens, proposal.parents, strict=True):
        paths.append([*(paths[parent] if parent >= 0 else ()), token])
        contexts.append(RowContext(seq, paths[-1]))
    return contexts


def _record_logprobs(sampled: list[Sampled], output: ModelOutput) -> None:
    """Record raw log-probabilities for the kept tokens of requests that asked for them and have
    none yet, in one call."""
    items = [s for s in sampled if s.chunk.seq.params.logprobs is not None and s.tokens]
    items = [item for item in items if item.logprobs is None]
    if not items:
        return
    rows, tokens, counts = [], [], []
    for item in items:
        rows += [item.row + row for row in item.rows]
        tokens += item.tokens
        counts += [item.chunk.seq.params.logprobs or 0] * len(item.tokens)
    scores = iter(token_logprobs(output.logits, rows, tokens, counts))
    for item in items:
        item.logprobs = [next(scores) for _ in item.tokens]


def _record_prompt_logprobs(chunk: Chunk, output: ModelOutput, row: int) -> None:
    """Record prompt scores: row p scores the prompt token at p+1; the first token has none."""
    seq = chunk.seq
    if chunk.start == 0:
        seq.prompt_logprobs = [None]
    targets = seq.tokens[chunk.start + 1 : min(chunk.end + 1, seq.num_prompt)]
    count = seq.params.prompt_logprobs or 0
    rows = list(range(row, row + len(targets)))
    seq.prompt_logprobs += token_logprobs(output.logits, rows, targets, [count] * len(targets))
