"""Lookahead: its n-gram pool, its window, and how much of both fits into a proposal."""

from __future__ import annotations

from itertools import count

import pytest

from engine.config import LookaheadConfig
from engine.messages import SamplingParams
from engine.scheduling.sequence import Sequence
from engine.scheduling.step_plan import Chunk
from engine.speculation.lookahead import LookaheadProposer, Pool, Tree, Window
from engine.speculation.proposal import EMPTY, Proposal, Verified
from engine.speculation.verify import walk

W, N, G = 3, 4, 2


def test_the_pool_evicts_the_least_recently_seen() -> None:
    """Law: per first token the latest n-grams stay, latest first; a repeat counts as latest."""
    pool = Pool(each=2, most=100)
    for gram in [(1, 2, 3), (1, 4, 5), (1, 2, 3), (1, 6, 7), (9, 1, 2)]:
        pool.add(gram)
    assert pool.continuations(1) == [(6, 7), (2, 3)]
    assert pool.continuations(9) == [(1, 2)]
    assert pool.continuations(2) == []


def test_the_pool_is_bounded_over_all_first_tokens() -> None:
    """Law: the pool never exceeds `most` n-grams, and drops a first token with its last n-gram."""
    pool = Pool(each=4, most=3)
    for token in range(50):
        pool.add((token, 0))
        pool.add((0, token))
        assert len(pool) <= 3
    assert [pool.continuations(token) for token in range(48)] == [[(49,), (48,)]] + [[]] * 47
    assert set(pool._by_first) == {0, 49}


def test_the_window_fills_one_level_a_step_and_then_slides() -> None:
    """Law: after `ngram - 2` steps the window has W columns of `ngram - 1` levels. Then each step
    drops the oldest level and moves the rest up and by one position, so that the target's token
    after column 1 of a level is at column 0 once the text has its next token."""
    window = Window(W, N, count(100))
    assert window.levels == [[100, 101, 102, 103]]
    assert [window.path(i) for i in (0, 1, 4)] == [[], [100], [100, 101, 102, 103]]
    assert window.move(7, [8, 1, 2, 3, 4]) == []
    assert window.levels == [[101, 102, 103], [1, 2, 3, 4]]
    assert window.path(2) == [101, 102, 3]
    assert window.move(8, [9, 11, 12, 13]) == []
    assert window.levels == [[102, 103], [2, 3, 4], [11, 12, 13]]
    grams = window.move(9, [21, 22, 23])
    assert grams == [(9, 2, 11, 21), (102, 3, 12, 22), (103, 4, 13, 23)]
    assert window.levels == [[3, 4], [11, 12, 13], [21, 22, 23]]
    assert window.columns == W


def test_a_column_without_a_target_token_gives_no_n_gram() -> None:
    """Law: a column without a target token is filled with one from the text and continues."""
    window = Window(2, 3, count(100))
    window.move(1, [2, 3, 4])
    assert window.move(2, [None, 6]) == [(101, 4, 6)]
    assert window.levels == [[4], [102, 6]]


@pytest.mark.parametrize(("width", "ngram"), [(1, 2), (5, 2), (1, 5), (4, 3)])
def test_every_shape_of_window_keeps_its_shape(width: int, ngram: int) -> None:
    window = Window(width, ngram, count())
    for step in range(3 * ngram):
        assert len(window.levels) == min(step + 1, ngram - 1)
        window.move(0, [1] * window.columns)
    assert [len(level) for level in window.levels] == [width - 1] + [width] * (ngram - 2)


def test_paths_that_begin_alike_share_nodes() -> None:
    tree = Tree()
    for path in ([1, 2, 3], [1, 2, 4], [2, 2], [1, 2, 3]):
        tree.add(path, 6)
    assert tree.proposal("it") == Proposal([1, 2, 3, 4, 2, 2], [-1, 0, 1, 1, -1, 4], "it")
    tree.add([2, 2, 9, 9], 7)
    assert len(tree.proposal("it")) == 7


def sequence(tokens: list[int]) -> Sequence:
    return Sequence("s", SamplingParams(seed=0, max_tokens=1000), tokens, len(tokens))


def propose(proposer: LookaheadProposer, seq: Sequence, k: int) -> Proposal:
    [proposal] = proposer.propose([Chunk(seq, seq.num_tokens - 1, 1, k)])
    assert len(proposal) <= k
    return proposal


def next_token(token: int) -> int:
    """Return the token of a target that looks at one row: always the next number."""
    return (token + 1) % 50


def step(proposer: LookaheadProposer, seq: Sequence, k: int) -> list[int]:
    proposal = propose(proposer, seq, k)
    drawn = [next_token(token) for token in (seq.tokens[-1], *proposal.tokens)]
    result = walk(proposal, drawn)
    proposer.learn([Verified(seq, proposal, drawn, result.path, result.tokens)])
    seq.tokens += result.tokens
    return result.tokens


def test_tokens_learned_ahead_are_accepted_when_the_text_gets_there() -> None:
    """Law: what the window learned to follow 10 is accepted when the text reaches 10, although it
    never occurred in the text; that step yields as many tokens as an n-gram has."""
    proposer = LookaheadProposer(LookaheadConfig(window=W, ngram=N, guesses=G))
    seq = sequence([20, 30, 10, 5])
    counts = [len(step(proposer, seq, 16)) for _ in range(8)]
    assert seq.tokens[4:] == [next_token(token) for token in seq.tokens[3:-1]]
    assert counts[:6] == [1, 1, 1, 1, 1, N]


def test_the_prompt_is_in_the_pool() -> None:
    proposer = LookaheadProposer(LookaheadConfig(window=1, ngram=3, guesses=2))
    proposal = propose(proposer, sequence([1, 2, 3, 9, 1, 4, 5, 1]), 16)
    children = {t for t, p in zip(proposal.tokens, proposal.parents, strict=True) if p == -1}
    assert {2, 4} <= children


def test_a_small_bound_leaves_out_n_grams_then_the_window() -> None:
    """Law: a proposal holds the whole window or none of it, and always at least one n-gram."""
    config = LookaheadConfig(window=3, ngram=3, guesses=4)  # 5 nodes, plus 2 for each n-gram
    prompt = [1, 40, 41, 1, 42, 43, 1, 44, 45, 1]

    def kept(k: int) -> tuple[int, int]:
        """Return the number of n-grams and of the filled window's columns in a proposal."""
        proposer, seq = LookaheadProposer(config), sequence([*prompt])
        propose(proposer, seq, 16)
        state = proposer._states[seq]
        state.window.levels = [[60, 61], [70, 71, 72]]
        proposal = propose(proposer, seq, k)
        return sum(t in (41, 43, 45) for t in proposal.tokens), sum(
            t in (70, 71, 72) for t in proposal.tokens
        )

    assert [kept(k) for k in (16, 11, 9, 7, 5, 3, 2)] == [
        (3, 3), (3, 3), (2, 3), (1, 3), (2, 0), (1, 0), (1, 0),
    ]  # fmt: skip


def test_a_window_that_was_left_out_stands_still() -> None:
    """Bug: while the window was left out, tokens of the text replaced what it had found."""
    proposer = LookaheadProposer(LookaheadConfig(window=2, ngram=3, guesses=4))
    seq = sequence([1, 40, 41, 1, 42, 43, 1])
    propose(proposer, seq, 16)
    window = proposer._states[seq].window
    window.levels = [[60], [70, 71]]
    step(proposer, seq, 4)
    assert window.levels == [[60], [70, 71]]


@pytest.mark.parametrize("k", range(1, 8))
def test_the_window_fills_at_any_k(k: int) -> None:
    """Law: if K is too small for the window from the first step on, the window becomes narrower."""
    proposer = LookaheadProposer(LookaheadConfig(window=8, ngram=3, guesses=4))
    seq = sequence(list(range(40)))
    for _ in range(4):
        step(proposer, seq, k)
    assert proposer._states[seq].window.is_full
    assert proposer._states[seq].window.columns == max((k + 1) // 2, 1)


def test_others_draft_tokens_leave_the_window_where_it_is() -> None:
    """Law: another proposer's tokens leave the window alone, but their n-grams enter the pool."""
    proposer = LookaheadProposer(LookaheadConfig(window=2, ngram=3, guesses=2))
    seq = sequence([1, 2, 3])
    propose(proposer, seq, 16)
    before = [list(level) for level in proposer._states[seq].window.levels]
    proposer.learn([Verified(seq, EMPTY, [4], [], [4])])
    seq.tokens += [4, 5, 6]  # also from steps without any draft tokens
    assert proposer._states[seq].window.levels == before
    propose(proposer, seq, 16)
    assert [proposer._states[seq].pool.continuations(at) for at in (2, 3, 4)] == [
        [(3, 4)],
        [(4, 5)],
        [(5, 6)],
    ]


def test_nothing_is_kept_of_a_sequence_that_is_forgotten_or_was_never_proposed_for() -> None:
    proposer = LookaheadProposer(LookaheadConfig())
    seq, other = sequence([1, 2, 3, 4, 5]), sequence([1, 2])
    propose(proposer, seq, 8)
    proposer.learn([Verified(other, EMPTY, [4], [], [4])])
    assert set(proposer._states) == {seq}
    proposer.forget(seq)
    assert not proposer._states


def test_hindsight_is_what_it_would_have_proposed() -> None:
    """Law: after steps at K = 0, each tree is judged that it would have proposed in consecutive
    rounds since then, from the pool of that time; a tree without nodes counts, too."""
    text = [1, 2, 3, 4, 9, 1, 2, 3, 5, 9, 1, 2, 3, 5, 9, 1, 2, 3, 7, 1, 2]
    proposer, other, hits = proposer_of(3), proposer_of(3), list[bool]()
    seq, again = sequence(text[:6]), sequence(text[:6])
    for each, asked in ((proposer, seq), (other, again)):
        propose(each, asked, 6)
        assert not each.agreements
    for begin in range(6, len(text), 5):
        seq.tokens, at = text[: begin + 5], begin + 1  # the token at `begin` was verified
        propose(proposer, seq, 6)
        for found in proposer.agreements:
            again.tokens = text[:at]
            tree = propose(other, again, 6)
            path, known = tree.along(seq.tokens[at:])
            assert known == len(tree), "its other nodes would seem not to have been proposed"
            assert (found.position, found.k) == (at - 6, 6)
            assert found.hits == [node in path for node in range(known)]
            at, hits = at + 1 + len(path), hits + found.hits
        assert at >= len(seq.tokens) - 1
    assert 3 < sum(hits) < len(hits)


def test_in_hindsight_a_wide_window_is_judged_in_full() -> None:
    """Bug: with more than two columns it is deeper than an n-gram, and where the text ended within
    it, its last nodes seemed not to have been proposed."""
    proposer = LookaheadProposer(LookaheadConfig(window=4, ngram=3, guesses=2))
    seq = sequence([7] * 8)
    assert len(propose(proposer, seq, 6)) == 3
    seq.tokens += [*range(20, 30), 7, 7]  # as the window has it, as far as the text goes
    propose(proposer, seq, 6)
    assert {len(found.compared) for found in proposer.agreements} == {3}


@pytest.mark.parametrize(("k", "depth"), [(5, 3), (7, 4), (20, 8)])
def test_in_hindsight_a_narrow_window_needs_less_text(k: int, depth: int) -> None:
    """Bug: a window that K had narrowed was judged only where the text was as long as that of the
    configuration is deep, so after few steps at K = 0 nothing was known about it."""
    for spell, judged in ((depth, 0), (depth + 1, 1)):
        proposer = LookaheadProposer(LookaheadConfig(window=8, ngram=3, guesses=2))
        seq = sequence([7] * 40)
        tree = propose(proposer, seq, k)
        assert max(tree.depths()) == depth
        seq.tokens += [20, *[7] * spell][:spell]
        propose(proposer, seq, k)
        assert [found.hits for found in proposer.agreements] == [[True] * depth] * judged


def proposer_of(ngram: int) -> LookaheadProposer:
    return LookaheadProposer(LookaheadConfig(window=2, ngram=ngram, guesses=2))
