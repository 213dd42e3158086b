"""Makes the StepRecord of a step, and the sums for the front end."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from operator import ne

from engine.messages import CONTEXTS, StepMetrics, StepSeconds
from engine.scheduling.sequence import Sequence
from engine.scheduling.step_plan import Chunk, StepPlan
from engine.scheduling.step_record import SequenceStep, StepRecord
from engine.speculation.allowance import Allowance
from engine.speculation.cascade import Cascade
from engine.speculation.proposal import EMPTY, GRAMMAR
from engine.step.acceptance import Sampled
from engine.step.clock import Overhead

_CONTEXTS = list(CONTEXTS.values())


def observe(
    plan: StepPlan,
    sampled: list[Sampled],
    seconds: StepSeconds,
    *,
    num_waiting: int,
    proposer: Cascade,
    allowance: Allowance,
    overhead: Overhead,
    trees: bool = False,
) -> StepRecord:
    """Return the record of a step, after its commit. `trees`: the main proposer proposes trees."""
    main, items = proposer.name, iter([*sampled, None])  # in the order of the plan
    item, parts = next(items), list[SequenceStep]()
    for chunk in plan.chunks:
        if item is None or item.chunk is not chunk:
            parts.append(_prompt_part(chunk))
        else:
            parts.append(_part(item, main, allowance, trees=trees))
            item = next(items)
    more = overhead.seconds(len(parts), speculates=any(part.k for part in parts))
    return StepRecord(
        parts,
        reason=allowance.choice.reason,
        draft_seconds=seconds.propose,
        target_seconds=seconds.verify,
        host_seconds=seconds.schedule + seconds.accept + seconds.commit + seconds.emit + more,
        overhead_seconds=more,
        catch_up_rows=proposer.catch_up_rows,
        num_waiting=num_waiting,
        hindsight=proposer.agreements,
    )


def _prompt_part(chunk: Chunk) -> SequenceStep:
    """Return the part of a chunk that does not sample."""
    seq, start, length, _ = chunk
    position = len(seq.tokens) - seq.num_prompt
    return SequenceStep(seq.number, position, start, length, _num_prompt_rows(chunk))


def _num_prompt_rows(chunk: Chunk) -> int:
    """Return how many of its rows are prompt positions."""
    left = chunk.seq.num_prompt - chunk.start
    return 0 if left <= 0 else min(chunk.length, left)


def _part(item: Sampled, main: str, allowance: Allowance, *, trees: bool) -> SequenceStep:
    chunk, proposal = item.chunk, item.proposal
    num_tokens, accepted = len(item.tokens), item.num_accepted
    seq, start, length, _ = chunk
    draft = allowance.cut.get(seq, proposal) if allowance.cut else proposal
    source = "" if draft.source in (main, EMPTY.source) else draft.source
    k, bounded = 0 if source else allowance.main_limit(chunk), seq in allowance.waiting
    if seq.sources is not None:
        bounded = not allowance.is_open(seq)
    # Positional arguments: keywords would take most of this function's time.
    begin = len(seq.tokens) - seq.num_prompt - num_tokens
    prompt, finish = 0 if start >= seq.num_prompt else _num_prompt_rows(chunk), item.finish or ""
    if not draft.tokens:
        return SequenceStep(seq.number, begin, start, length, prompt, k, 0, 0, 0, num_tokens, 0, 0,
            finish, source, bounded)  # fmt: skip
    if trees and not source:
        path, tried = draft.along(item.tokens)
        right = len(path)
    else:
        (tried, right), path = _compare(draft.tokens, item.tokens), []
    forced = _forced(item) if proposal.forced else (0, 0)
    depths = [] if proposal.branches is None else proposal.depths()
    second_best = 0
    if tried > right and draft.second_best:
        second_best = 1 if draft.second_best[right] == item.tokens[right] else -1
    return SequenceStep(seq.number, begin, start, length, prompt, k, len(draft.tokens),
        len(proposal.tokens), accepted, num_tokens, tried, right, finish, source, bounded,
        draft.confidences[:tried], forced, depths, path, second_best)  # fmt: skip


def _compare(draft_tokens: list[int], tokens: list[int]) -> tuple[int, int]:
    """Return (tried, right): how many draft tokens are known to be right or wrong, and how many
    were right. Tokens left out of the forward are compared with the committed tokens."""
    wrong = [*map(ne, draft_tokens, tokens)]
    right = wrong.index(True) if True in wrong else len(wrong)
    return right + (right < len(wrong)), right


def _forced(item: Sampled) -> tuple[int, int]:
    """Return how many proposed tokens the grammar added, and how many were accepted."""
    forced = item.proposal.forced
    return len(forced), sum(node in forced for node in item.path[: item.num_accepted])


def measure(
    record: StepRecord,
    plan: StepPlan,
    gauges: StepMetrics,
    *,
    new: list[Sequence],
    main: str,
    plain_seconds: Callable[[int, int], float],
) -> StepMetrics:
    """Return `gauges` with this step's sums filled in. `new`: sequences that were admitted for the
    first time; `main`: the main proposer's name; `plain_seconds`: see CostModel."""
    sampling = [part for part in record.parts if part.tokens or part.finish]
    gauges.num_generated_tokens = tokens = record.tokens
    gauges.num_sampling = size = len(sampling)
    if sum([part.rows for part in record.parts]) == size:  # one row each: no prompts
        gauges.plain_seconds = tokens / size * plain_seconds(size, record.context)
    gauges.num_prompt_tokens = sum([part.prompt for part in record.parts])
    _count_draft_tokens(gauges, sampling, main)
    for seq in new:
        gauges.queried_tokens += seq.num_prompt
        gauges.cached_tokens += seq.cached_tokens or 0
    gauges.preemptions = len(plan.preempted)
    return gauges


def _count_draft_tokens(gauges: StepMetrics, sampling: list[SequenceStep], main: str) -> None:
    """Count each sampling sequence at its number of verified draft tokens; the planned number is
    only an upper bound."""
    sizes = [part.proposed for part in sampling]
    most = max(sizes, default=0)
    gauges.k_counts = [sizes.count(size) for size in range(most + 1)]
    if not most:
        return
    gauges.proposed_at = _reaching([part.proposed for part in sampling if not part.depths], most)
    gauges.accepted_at = _reaching([part.accepted for part in sampling], most)
    by_proposer: dict[str, tuple[int, int]] = {}
    by_context = [0] * len(_CONTEXTS), [0] * len(_CONTEXTS)
    for part in sampling:
        proposed, accepted, (forced, kept) = part.proposed, part.accepted, part.forced
        if not proposed:
            continue
        for depth in part.depths:
            gauges.proposed_at[depth - 1] += 1
        if forced:
            before = by_proposer.get(GRAMMAR, (0, 0))
            by_proposer[GRAMMAR] = before[0] + forced, before[1] + kept
            proposed, accepted = proposed - forced, accepted - kept
        if part.source:
            before = by_proposer.get(part.source, (0, 0))
            by_proposer[part.source] = before[0] + proposed, before[1] + accepted
        else:
            at = bisect_left(_CONTEXTS, part.context)
            by_context[0][at] += proposed
            by_context[1][at] += accepted
    gauges.proposed_behind, gauges.accepted_behind = by_context
    if total := sum(by_context[0]):
        by_proposer[main] = total, sum(by_context[1])
    gauges.num_proposed, gauges.num_accepted = sum(sizes), sum(gauges.accepted_at)
    gauges.by_proposer = by_proposer


def _reaching(numbers: list[int], most: int) -> list[int]:
    """Return, for each of 1 .. `most`, how many of these numbers are at least as large."""
    counts = Counter(numbers).items()
    return [sum([n for number, n in counts if number >= size]) for size in range(1, most + 1)]
