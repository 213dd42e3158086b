"""SuffixProposer: it proposes what most often followed the suffix, here and in earlier replies."""

from __future__ import annotations

import itertools
import random
from array import array
from typing import NoReturn

import pytest

from engine.messages import FinishReason, SamplingParams
from engine.scheduling.sequence import Sequence
from engine.scheduling.step_plan import Chunk
from engine.speculation.proposal import EMPTY
from engine.speculation.suffix import SuffixProposer


def ngram(*, n_max: int, n_min: int) -> SuffixProposer:
    return SuffixProposer("ngram", remembered=0, shortest=n_min, longest=n_max)


def remembering(tokens: int) -> SuffixProposer:
    return SuffixProposer("suffix", remembered=tokens, shortest=2, longest=16)


def sequence(tokens: list[int], salt: str = "", tenant: str = "") -> Sequence:
    params = SamplingParams(seed=0, max_tokens=1000, cache_salt=salt)
    return Sequence("s", params, list(tokens), len(tokens), tenant=tenant)


def decode(seq: Sequence, k: int) -> Chunk:
    return Chunk(seq, seq.num_tokens - 1, 1, k)


def propose(proposer: SuffixProposer, seq: Sequence, k: int) -> list[int]:
    [proposal] = proposer.propose([decode(seq, k)])
    assert proposal.branches is None
    return proposal.tokens


def places(tokens: list[int], n_min: int) -> dict[int, int]:
    """Map the end of every earlier occurrence of the last `n_min` tokens, latest first, to the
    length of its match with the end of the text."""
    found = {}
    for end in range(len(tokens) - 1, n_min - 1, -1):
        run = 0
        while run < end and tokens[end - 1 - run] == tokens[-1 - run]:
            run += 1
        if run >= n_min:
            found[end] = run
    return found


def continued(tokens: list[int], end: int, k: int) -> list[int]:
    """Return the `k` tokens that followed `end`, repeating the text beyond its own end."""
    out = list(tokens)
    for i in range(k):
        out.append(out[end + i])
    return out[len(tokens) :]


def test_proposes_what_followed_the_suffix() -> None:
    seq = sequence([1, 2, 3, 4, 5, 6, 9, 1, 2, 3])
    assert propose(ngram(n_max=3, n_min=2), seq, 3) == [4, 5, 6]


def test_the_most_recent_occurrence_wins() -> None:
    seq = sequence([1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3])
    assert propose(ngram(n_max=3, n_min=2), seq, 1) == [8]


def test_a_longer_suffix_beats_a_more_recent_one() -> None:
    seq = sequence([5, 1, 2, 7, 6, 1, 2, 8, 5, 1, 2])
    assert propose(ngram(n_max=3, n_min=2), seq, 1) == [7]


def test_a_match_that_reaches_the_end_is_repeated() -> None:
    """Law: a text that repeats with period 2 is continued for all of k, not for 2 tokens only."""
    seq = sequence([9, 1, 2, 1, 2, 1, 2])
    assert propose(ngram(n_max=4, n_min=2), seq, 6) == [1, 2, 1, 2, 1, 2]


def test_a_short_match_is_weak_evidence_and_proposes_little() -> None:
    seq = sequence([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2])
    assert propose(ngram(n_max=8, n_min=2), seq, 8) == [3, 4, 5, 6]


@pytest.mark.parametrize("tokens", [[1], [1, 2], [1, 2, 3], [4, 1, 2, 3, 5]])
def test_without_a_match_nothing_is_proposed(tokens: list[int]) -> None:
    assert propose(ngram(n_max=3, n_min=1), sequence(tokens), 4) == []


def test_only_sampling_chunks_with_k_get_a_proposal() -> None:
    seq = sequence([1, 2, 1, 2, 1, 2])
    proposer = ngram(n_max=2, n_min=1)
    proposals = proposer.propose([Chunk(seq, 0, 3, 0), decode(seq, 0), decode(seq, 2)])
    assert proposals[:2] == [EMPTY, EMPTY]
    assert proposals[2].tokens == [1, 2]
    assert proposals[2].source == "ngram"


def majority(tokens: list[int], ends: list[int], k: int) -> list[int]:
    """Return what most places continue with (the latest on a tie), keeping those that agree."""
    out = list(tokens)
    for i in range(k):
        heads = [out[end + i] for end in ends]
        out.append(max(heads, key=heads.count))
        ends = [end for end, head in zip(ends, heads, strict=True) if head == out[-1]]
    return out[len(tokens) :]


@pytest.mark.parametrize("seed", range(8))
def test_the_first_lookup_follows_the_majority_of_the_longest_matches(seed: int) -> None:
    """Law: of the shortest suffix's last sixteen occurrences, those with the longest match vote
    (lengths from `n_max` on are equal); the majority wins, and the latest wins a tie. Three letters
    make matches of every length occur."""
    rng = random.Random(seed)
    found = 0
    for _ in range(100):
        tokens = [rng.randrange(3) for _ in range(rng.randrange(1, 120))]
        latest = [(end, min(run, 6)) for end, run in places(tokens, 2).items()][:16]
        proposed = propose(ngram(n_max=6, n_min=2), sequence(tokens), 4)
        longest = max((run for _, run in latest), default=0)
        ends = [end for end, run in latest if run == longest]
        assert proposed == (majority(tokens, ends, 4) if ends else [])
        found += bool(ends)
    assert found > 50


@pytest.mark.parametrize("seed", range(8))
def test_growing_by_random_steps_stays_at_an_occurrence(seed: int) -> None:
    """Law: whatever the history of proposals, steps at k = 0 and lengths of steps, a proposal
    follows an earlier occurrence of the suffix, and there is a draft token whenever there is such
    an occurrence."""
    rng = random.Random(seed)
    proposer = ngram(n_max=6, n_min=2)
    seq = sequence([rng.randrange(3) for _ in range(rng.randrange(1, 30))])
    found = 0
    for _ in range(150):
        k = rng.randrange(9)
        proposed, ends = propose(proposer, seq, k), places(seq.tokens, 2)
        assert bool(proposed) == bool(ends and k)
        if proposed:
            assert len(proposed) >= min(k, 4)
            assert any(continued(seq.tokens, end, len(proposed)) == proposed for end in ends)
        found += bool(proposed)
        seq.tokens += [rng.randrange(3) for _ in range(rng.randrange(1, 6))]
    assert found > 50


def test_a_match_is_kept_while_its_draft_tokens_are_accepted() -> None:
    """Law: a recurring passage is looked up once, not once per token, even though a shorter match
    is more recent."""
    passage = [1, 2, 3, 4, 5, 6]
    seq = sequence([*passage, 9, 3, 4, 8, *passage[:3]])
    proposer = ngram(n_max=8, n_min=2)
    assert propose(proposer, seq, 3) == [4, 5, 6]
    seq.tokens.append(4)
    assert propose(proposer, seq, 2) == [5, 6]


class Unread(list[int]):
    """A list that nobody may go through from its start."""

    def __iter__(self) -> NoReturn:
        raise AssertionError("all tokens were read")


def test_a_step_reads_only_the_new_tokens() -> None:
    """Bug: to reach the new tokens, each step went through all tokens before them: with 32,000
    tokens for 0.06 ms per sequence."""
    proposer, seq = ngram(n_max=8, n_min=2), sequence([])
    seq.tokens = Unread([1, 2, 3, 4, 5, 6, 7, 1, 2])
    assert propose(proposer, seq, 3) == [3, 4, 5]
    seq.tokens += [3, 4]
    assert propose(proposer, seq, 3) == [5, 6, 7]


def test_preemption_changes_nothing_and_forgetting_costs_only_work() -> None:
    seq = sequence([1, 2, 3, 4, 1, 2, 3])
    proposer = ngram(n_max=3, n_min=2)
    before = propose(proposer, seq, 3)
    seq.num_computed, seq.blocks, seq.status = 0, array("i"), "waiting"
    assert propose(proposer, seq, 3) == before
    proposer.forget(seq)
    proposer.forget(seq)
    assert propose(proposer, seq, 3) == before == [4, 1, 2]


def test_sequences_do_not_see_each_other() -> None:
    """Law: the index belongs to the sequence object, so equal ids do not share it."""
    one, other = sequence([1, 2, 3, 1, 2]), sequence([1, 2, 9, 1, 2])
    proposer = ngram(n_max=2, n_min=2)
    assert [p.tokens[0] for p in proposer.propose([decode(one, 1), decode(other, 1)])] == [3, 9]


@pytest.mark.parametrize("likely", [True, False])
def test_a_forecast_follows_past_acceptance(likely: bool) -> None:
    """Law: chances follow what was committed, whoever proposed it: high in a text that repeats
    itself, low in one whose repetitions mislead."""
    rng = random.Random(3)
    seq = sequence(list(range(9)) * 3 if likely else [rng.randrange(4) for _ in range(60)])
    proposer = ngram(n_max=8, n_min=2)
    for i in range(90):
        assert len(proposer.forecast(seq, 4)) <= 4
        seq.tokens.append(i % 9 if likely else rng.randrange(4))
    chances = proposer.forecast(seq, 4)
    assert chances == sorted(chances, reverse=True)
    assert len(chances) == len(propose(proposer, seq, 4)) > 0
    assert (chances[0] > 0.9) if likely else (chances[0] < 0.4)
    proposer.forget(seq)


def test_no_draft_tokens_have_no_chances() -> None:
    assert ngram(n_max=3, n_min=2).forecast(sequence([1, 2, 3]), 4) == []


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_text_shorter_than_the_shortest_suffix_has_no_match(count: int) -> None:
    seq = sequence([7] * count)
    proposer = ngram(n_max=8, n_min=4)
    assert propose(proposer, seq, 4) == []
    seq.tokens += [7] * 4
    assert propose(proposer, seq, 4) == [7] * 4


def test_estimates_do_not_depend_on_the_lengths_of_steps() -> None:
    """Law: a sequence examined once for several tokens, first as expected and then not, has the
    same chances as one examined after each token."""
    text = [1, 2, 3, *range(10, 60), 1, 2, 3, *range(10, 45), 5, 1, 2, 3, 10, 11]
    forecasts = []
    for step in (1, 4):
        proposer, seq = ngram(n_max=8, n_min=2), sequence(text[:56])
        while True:
            proposer.forecast(seq, 8)
            if len(seq.tokens) == len(text):
                break
            seq.tokens += text[len(seq.tokens) : len(seq.tokens) + step]
        forecasts.append(proposer.forecast(seq, 8))
    assert forecasts[0]
    assert forecasts[0] == pytest.approx(forecasts[1])


def ended(proposer: SuffixProposer, prompt: list[int], reply: list[int], *owner: str) -> None:
    """Serve a request to its end. `owner`: salt and tenant."""
    seq = sequence(prompt, *owner)
    seq.tokens += reply
    seq.status, seq.finish = "finished", "stop"
    proposer.forget(seq)


@pytest.mark.parametrize("seed", range(4))
def test_what_was_proposed_before_does_not_change_a_proposal(seed: int) -> None:
    """Law: tokens and chances are those of a proposer that followed the same text and was never
    asked for a proposal, whichever part of earlier proposals was accepted."""
    rng, compared = random.Random(seed), 0
    for _ in range(40):
        replies = [[rng.randrange(4) for _ in range(20)] for _ in range(3)]
        asked, silent = remembering(1000), remembering(1000)
        for proposer, reply in itertools.product((asked, silent), replies):
            ended(proposer, [1, 2, 3], reply)
        seq = sequence([rng.randrange(4) for _ in range(10)])
        for _ in range(20):
            right = propose(asked, seq, rng.randrange(1, 9))[: rng.randrange(9)]
            silent.forecast(seq, 0)
            seq.tokens += [*right, rng.randrange(4)]
        assert asked.forecast(seq, 8) == silent.forecast(seq, 8)
        assert (tokens := propose(asked, seq, 8)) == propose(silent, seq, 8)
        compared += bool(tokens)
    assert compared > 20


REPLY = list(range(20, 40))


def test_an_earlier_reply_is_found_from_its_first_token_on() -> None:
    """Law: the prompt's end, which like requests share, finds a reply, proposed up to its end."""
    proposer = remembering(1000)
    ended(proposer, [1, 2, 3], REPLY)
    seq = sequence([9, 2, 3])
    assert propose(proposer, seq, 8) == REPLY[:4]
    seq.tokens += REPLY[:16]
    assert propose(proposer, seq, 8) == REPLY[16:]


def test_the_most_frequent_of_earlier_replies_is_proposed() -> None:
    """Law: the most frequent reply wins, and a draft token's chance falls with its share."""
    proposer = remembering(1000)
    for reply in ([5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 9, 9], [5, 6, 7, 4]):
        ended(proposer, [1, 2], reply)
    seq = sequence([3, 1, 2])
    assert propose(proposer, seq, 4) == [5, 6, 7, 8]
    of_one_mind = remembering(1000)
    ended(of_one_mind, [1, 2], [5, 6, 7, 8])
    sure = of_one_mind.forecast(sequence([3, 1, 2]), 4)
    shares = [1, 1, 3 / 4, 3 / 4 * 2 / 3]
    expected = [chance * share for chance, share in zip(sure, shares, strict=True)]
    assert proposer.forecast(seq, 4) == pytest.approx(expected)
    seq.tokens += [5, 6, 9]
    assert propose(proposer, seq, 4) == [9]


def test_replies_of_another_salt_or_key_are_not_found() -> None:
    """Law: a reply is found under the same salt and API key only, whatever salt a client sends."""
    proposer = remembering(1000)
    ended(proposer, [1, 2], REPLY, "a", "key")
    for owner in [("b", "key"), ("", "key"), ("a", "other"), ("key", "a"), ("a", "")]:
        assert propose(proposer, sequence([1, 2], *owner), 4) == []
    assert propose(proposer, sequence([1, 2], "a", "key"), 4) == REPLY[:4]


@pytest.mark.parametrize("finish", [None, "error"])
def test_preempted_and_failed_replies_are_not_remembered(finish: FinishReason | None) -> None:
    proposer, seq = remembering(1000), sequence([1, 2])
    seq.tokens += REPLY
    seq.status, seq.finish = "finished" if finish else "waiting", finish
    proposer.forget(seq)
    assert propose(proposer, sequence([1, 2]), 4) == []


def test_the_oldest_replies_make_room() -> None:
    """Law: at least the newest half of the `remembered` tokens is kept; a reply longer than half of
    them is not."""
    proposer = remembering(200)
    for number in range(40):
        ended(proposer, [100 + number, 200 + number], REPLY)
    known = [bool(propose(proposer, sequence([100 + n, 200 + n]), 1)) for n in range(40)]
    assert known == sorted(known)
    assert 4 <= sum(known) <= 8
    ended(proposer, [1, 2], list(range(1000, 1100)))
    assert propose(proposer, sequence([1, 2]), 1) == []
