"""NgramProposer: the most recent earlier occurrence of the longest suffix, incrementally."""

from __future__ import annotations

import random

import pytest

from engine.messages import SamplingParams
from engine.sequence import Sequence
from engine.speculation.ngram import NgramProposer, suffix_sizes
from engine.speculation.proposal import EMPTY
from engine.step_plan import Chunk


def sequence(tokens: list[int]) -> Sequence:
    return Sequence("s", SamplingParams(seed=0, max_tokens=1000), list(tokens), len(tokens))


def decode(seq: Sequence, k: int) -> Chunk:
    return Chunk(seq, seq.num_tokens - 1, 1, k)


def guess(proposer: NgramProposer, seq: Sequence, k: int) -> list[int]:
    [proposal] = proposer.propose([decode(seq, k)])
    assert proposal.is_chain
    assert proposal.num_candidates == len(proposal)
    return proposal.tokens


def scanned(tokens: list[int], sizes: list[int], k: int) -> list[int]:
    """What the proposer must find, by looking at every earlier window, from the right."""
    for size in sizes:
        for end in range(len(tokens) - 1, size - 1, -1):
            if len(tokens) > size and tokens[end - size : end] == tokens[-size:]:
                out = list(tokens)
                for i in range(k if size >= 3 else min(k, 4)):
                    out.append(out[end + i])
                return out[len(tokens) :]
    return []


def test_proposes_what_followed_the_suffix() -> None:
    seq = sequence([1, 2, 3, 4, 5, 6, 9, 1, 2, 3])
    assert guess(NgramProposer(n_max=3, n_min=2), seq, 3) == [4, 5, 6]


def test_the_most_recent_occurrence_wins() -> None:
    seq = sequence([1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3])
    assert guess(NgramProposer(n_max=3, n_min=2), seq, 1) == [8]


def test_a_longer_suffix_beats_a_more_recent_one() -> None:
    seq = sequence([5, 1, 2, 7, 6, 1, 2, 8, 5, 1, 2])
    assert guess(NgramProposer(n_max=3, n_min=2), seq, 1) == [7]


def test_a_match_that_reaches_the_end_goes_round() -> None:
    """A sequence that repeats with period 2 is continued for all of k, not for 2 tokens only."""
    seq = sequence([9, 1, 2, 1, 2, 1, 2])
    assert guess(NgramProposer(n_max=4, n_min=2), seq, 6) == [1, 2, 1, 2, 1, 2]


def test_a_short_match_is_weak_evidence_and_proposes_little() -> None:
    seq = sequence([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2])
    assert guess(NgramProposer(n_max=8, n_min=2), seq, 8) == [3, 4, 5, 6]


@pytest.mark.parametrize("tokens", [[1], [1, 2], [1, 2, 3], [4, 1, 2, 3, 5]])
def test_without_a_match_nothing_is_proposed(tokens: list[int]) -> None:
    assert guess(NgramProposer(n_max=3, n_min=1), sequence(tokens), 4) == []


def test_only_sampling_chunks_with_k_get_a_proposal() -> None:
    seq = sequence([1, 2, 1, 2, 1, 2])
    proposer = NgramProposer(n_max=2, n_min=1)
    proposals = proposer.propose([Chunk(seq, 0, 3, 0), decode(seq, 0), decode(seq, 2)])
    assert proposals[:2] == [EMPTY, EMPTY]
    assert proposals[2].tokens == [1, 2]
    assert proposals[2].source == "ngram"


@pytest.mark.parametrize("seed", range(8))
def test_growing_by_random_steps_equals_scanning_everything(seed: int) -> None:
    """Law: whatever the history of proposals, spells at k = 0 and lengths of steps, the answer is
    that of a scan over all tokens. Three letters, so matches of every size occur."""
    rng = random.Random(seed)
    proposer = NgramProposer(n_max=6, n_min=2)
    sizes = suffix_sizes(2, 6)
    seq = sequence([rng.randrange(3) for _ in range(rng.randrange(1, 30))])
    found = 0
    for _ in range(150):
        k = rng.randrange(9)
        expected = scanned(seq.tokens, sizes, k) if k else []
        assert guess(proposer, seq, k) == expected
        found += bool(expected)
        seq.tokens += [rng.randrange(3) for _ in range(rng.randrange(1, 6))]
    assert found > 50


def test_preemption_changes_nothing_and_forgetting_costs_only_work() -> None:
    seq = sequence([1, 2, 3, 4, 1, 2, 3])
    proposer = NgramProposer(n_max=3, n_min=2)
    before = guess(proposer, seq, 3)
    seq.num_computed, seq.blocks, seq.status = 0, [], "waiting"
    assert guess(proposer, seq, 3) == before
    proposer.forget(seq)
    proposer.forget(seq)
    assert guess(proposer, seq, 3) == before == [4, 1, 2]


def test_sequences_do_not_see_each_other() -> None:
    """Equal ids are no reason to share: the index belongs to the object."""
    one, other = sequence([1, 2, 3, 1, 2]), sequence([1, 2, 9, 1, 2])
    proposer = NgramProposer(n_max=2, n_min=2)
    assert [p.tokens[0] for p in proposer.propose([decode(one, 1), decode(other, 1)])] == [3, 9]


@pytest.mark.parametrize(
    ("n_min", "n_max", "sizes"),
    [(2, 2, [2]), (1, 4, [4, 3, 2, 1]), (2, 8, [8, 5, 3, 2]), (1, 64, [64, 16, 4, 1])],
)
def test_few_sizes_cover_the_range(n_min: int, n_max: int, sizes: list[int]) -> None:
    assert suffix_sizes(n_min, n_max) == sizes


@pytest.mark.parametrize("likely", [True, False])
def test_a_forecast_knows_how_often_it_was_right(likely: bool) -> None:
    """Law: chances follow what was committed, whoever guessed it: high in a text that repeats
    itself, low in one whose repetitions lead nowhere."""
    rng = random.Random(3)
    seq = sequence(list(range(9)) * 3 if likely else [rng.randrange(4) for _ in range(60)])
    proposer = NgramProposer(n_max=8, n_min=2)
    for i in range(90):
        assert len(proposer.forecast(seq, 4)) <= 4
        seq.tokens.append(i % 9 if likely else rng.randrange(4))
    chances = proposer.forecast(seq, 4)
    assert chances == sorted(chances, reverse=True)
    assert len(chances) == len(guess(proposer, seq, 4)) > 0
    assert (chances[0] > 0.9) if likely else (chances[0] < 0.4)
    proposer.forget(seq)


def test_nothing_to_say_has_no_chances() -> None:
    assert NgramProposer(n_max=3, n_min=2).forecast(sequence([1, 2, 3]), 4) == []
