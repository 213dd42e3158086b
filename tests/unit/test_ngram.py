"""NgramProposer: what followed an earlier occurrence of the suffix, found once and followed."""

from __future__ import annotations

import random
from array import array

import pytest

from engine.messages import SamplingParams
from engine.scheduling.sequence import Sequence
from engine.scheduling.step_plan import Chunk
from engine.speculation.ngram import NgramProposer
from engine.speculation.proposal import EMPTY


def sequence(tokens: list[int]) -> Sequence:
    return Sequence("s", SamplingParams(seed=0, max_tokens=1000), list(tokens), len(tokens))


def decode(seq: Sequence, k: int) -> Chunk:
    return Chunk(seq, seq.num_tokens - 1, 1, k)


def guess(proposer: NgramProposer, seq: Sequence, k: int) -> list[int]:
    [proposal] = proposer.propose([decode(seq, k)])
    assert proposal.is_chain
    return proposal.tokens


def places(tokens: list[int], n_min: int) -> dict[int, int]:
    """Behind every earlier occurrence of the last `n_min` tokens, from the right: how many tokens
    before it agree with the last ones."""
    found = {}
    for end in range(len(tokens) - 1, n_min - 1, -1):
        run = 0
        while run < end and tokens[end - 1 - run] == tokens[-1 - run]:
            run += 1
        if run >= n_min:
            found[end] = run
    return found


def continued(tokens: list[int], end: int, k: int) -> list[int]:
    """What came there, over and over if need be."""
    out = list(tokens)
    for i in range(k):
        out.append(out[end + i])
    return out[len(tokens) :]


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
def test_the_first_look_finds_the_longest_match(seed: int) -> None:
    """Law: of the last sixteen occurrences of the shortest suffix the one with the longest match,
    the latest of equals, where all from `n_max` on are equal. Three letters, so matches of every
    size occur."""
    rng = random.Random(seed)
    found = 0
    for _ in range(100):
        tokens = [rng.randrange(3) for _ in range(rng.randrange(1, 120))]
        latest = list(places(tokens, 2).items())[:16]
        proposed = guess(NgramProposer(n_max=6, n_min=2), sequence(tokens), 4)
        if not latest:
            assert proposed == []
            continue
        end, _ = max(latest, key=lambda place: min(place[1], 6))
        assert proposed == continued(tokens, end, 4)
        found += 1
    assert found > 50


@pytest.mark.parametrize("seed", range(8))
def test_growing_by_random_steps_stays_at_an_occurrence(seed: int) -> None:
    """Law: whatever the history of proposals, spells at k = 0 and lengths of steps, what is
    proposed came behind an earlier occurrence of the suffix, and something is whenever there is
    one."""
    rng = random.Random(seed)
    proposer = NgramProposer(n_max=6, n_min=2)
    seq = sequence([rng.randrange(3) for _ in range(rng.randrange(1, 30))])
    found = 0
    for _ in range(150):
        k = rng.randrange(9)
        proposed, ends = guess(proposer, seq, k), places(seq.tokens, 2)
        assert bool(proposed) == bool(ends and k)
        if proposed:
            assert len(proposed) >= min(k, 4)
            assert any(continued(seq.tokens, end, len(proposed)) == proposed for end in ends)
        found += bool(proposed)
        seq.tokens += [rng.randrange(3) for _ in range(rng.randrange(1, 6))]
    assert found > 50


def test_a_place_is_kept_while_it_is_right() -> None:
    """Law: there is one look-up for a passage that comes again, not one for each of its tokens,
    though a shorter match is later."""
    passage = [1, 2, 3, 4, 5, 6]
    seq = sequence([*passage, 9, 3, 4, 8, *passage[:3]])
    proposer = NgramProposer(n_max=8, n_min=2)
    assert guess(proposer, seq, 3) == [4, 5, 6]
    seq.tokens.append(4)
    assert guess(proposer, seq, 2) == [5, 6]


def test_preemption_changes_nothing_and_forgetting_costs_only_work() -> None:
    seq = sequence([1, 2, 3, 4, 1, 2, 3])
    proposer = NgramProposer(n_max=3, n_min=2)
    before = guess(proposer, seq, 3)
    seq.num_computed, seq.blocks, seq.status = 0, array("i"), "waiting"
    assert guess(proposer, seq, 3) == before
    proposer.forget(seq)
    proposer.forget(seq)
    assert guess(proposer, seq, 3) == before == [4, 1, 2]


def test_sequences_do_not_see_each_other() -> None:
    """Equal ids are no reason to share: the index belongs to the object."""
    one, other = sequence([1, 2, 3, 1, 2]), sequence([1, 2, 9, 1, 2])
    proposer = NgramProposer(n_max=2, n_min=2)
    assert [p.tokens[0] for p in proposer.propose([decode(one, 1), decode(other, 1)])] == [3, 9]


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


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_text_shorter_than_the_shortest_suffix_is_looked_up_in_vain(count: int) -> None:
    seq = sequence([7] * count)
    proposer = NgramProposer(n_max=8, n_min=4)
    assert guess(proposer, seq, 4) == []
    seq.tokens += [7] * 4
    assert guess(proposer, seq, 4) == [7] * 4


def test_what_is_learnt_does_not_depend_on_the_lengths_of_steps() -> None:
    """Law: a sequence looked at once in several tokens, all as expected and then not, tells the
    same chances as one looked at after each of them."""
    text = [1, 2, 3, *range(10, 60), 1, 2, 3, *range(10, 45), 5, 1, 2, 3, 10, 11]
    told = []
    for step in (1, 4):
        proposer, seq = NgramProposer(n_max=8, n_min=2), sequence(text[:56])
        while True:
            proposer.forecast(seq, 8)
            if len(seq.tokens) == len(text):
                break
            seq.tokens += text[len(seq.tokens) : len(seq.tokens) + step]
        told.append(proposer.forecast(seq, 8))
    assert told[0]
    assert told[0] == pytest.approx(told[1])
