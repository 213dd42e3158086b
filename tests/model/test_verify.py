"""Sample-and-match: the walk along a proposal, and that no proposal changes what is emitted."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from itertools import product

import pytest
import torch

from engine.messages import SamplingParams
from engine.sampling.device_draws import DeviceDraws
from engine.sampling.logits import LogitsProcessor, RowContext
from engine.sampling.plain import NOT_FINITE
from engine.scheduling.sequence import Sequence
from engine.speculation.proposal import EMPTY, Proposal, chain
from engine.speculation.verify import walk
from tests.support.slow_draws import finalize, sample

#        0:10 -- 2:11 -- 4:12
# root <
#        1:20 -- 3:21
TREE = Proposal([10, 20, 11, 21, 12], [-1, -1, 0, 1, 2], "tree")


@pytest.mark.parametrize(
    ("drawn", "path", "tokens"),
    [
        ([1, 2, 3, 4], [0, 1, 2], [1, 2, 3, 4]),
        ([1, 2, 9, 4], [0, 1], [1, 2, 9]),
        ([1, 9, 3, 4], [0], [1, 9]),
        ([9, 2, 3, 4], [], [9]),
    ],
)
def test_a_chain_is_followed_to_the_first_difference(
    drawn: list[int], path: list[int], tokens: list[int]
) -> None:
    result = walk(chain([1, 2, 3], "test"), drawn)
    assert (result.path, result.tokens) == (path, tokens)


@pytest.mark.parametrize(
    ("drawn", "path", "tokens"),
    [
        ([10, 11, 0, 12, 0, 7], [0, 2, 4], [10, 11, 12, 7]),
        ([20, 0, 21, 0, 8, 0], [1, 3], [20, 21, 8]),
        ([20, 0, 11, 0, 8, 0], [1], [20, 11]),  # 11 is no child of 20
    ],
)
def test_a_tree_is_followed_along_its_branches(
    drawn: list[int], path: list[int], tokens: list[int]
) -> None:
    result = walk(TREE, drawn)
    assert (result.path, result.tokens) == (path, tokens)
    assert len(result.tokens) == len(result.path) + 1


def test_twin_siblings_are_one_choice() -> None:
    twins = Proposal([1, 1, 2, 3], [-1, -1, 0, 1], "test")
    assert walk(twins, [1, 2, 0, 5, 0]).path == [0, 2]


@pytest.mark.parametrize("bad_row", range(4))
def test_a_row_that_is_no_number_ends_the_walk_before_it(bad_row: int) -> None:
    """Law: tokens drawn before the bad row stand; only a bad root leaves nothing. Rows off the
    accepted path do not matter."""
    drawn = [1, 2, 3, 4]
    drawn[bad_row] = NOT_FINITE
    result = walk(chain([1, 2, 3], "test"), drawn)
    assert result.tokens == [1, 2, 3][:bad_row]
    assert len(result.path) == max(bad_row - 1, 0)
    assert bool(walk(chain([7, 2, 3], "test"), drawn).tokens) == (bad_row > 0)


def test_without_a_proposal_the_target_is_sampled() -> None:
    assert walk(EMPTY, [5]).tokens == [5]
    assert not walk(EMPTY, [5]).path


# -- the law, by enumeration -----------------------------------------------------------------

ATOMS = 6
LENGTH = 3
Noise = tuple[int, ...]
Drafter = Callable[[tuple[int, ...], Noise], Proposal]


def target_law(history: tuple[int, ...]) -> list[int]:
    """Return each of four tokens' mass in sixths, different after every history."""
    weights = [[3, 2, 1, 0], [1, 1, 2, 2], [0, 0, 5, 1], [2, 2, 1, 1], [6, 0, 0, 0]]
    return weights[(sum(3**i * (t + 1) for i, t in enumerate(history))) % len(weights)]


def draw(history: tuple[int, ...], noise: Noise) -> int:
    """Draw a position's token from its own noise, with the target's distribution."""
    atom = noise[len(history)]
    return next(t for t in range(4) if atom < sum(target_law(history)[: t + 1]))


def path_tokens(proposal: Proposal, node: int) -> list[int]:
    """Return the tokens from the root's child down to `node`, inclusive; [] for -1."""
    tokens: list[int] = []
    while node >= 0:
        tokens.append(proposal.tokens[node])
        node = proposal.parents[node]
    return tokens[::-1]


def emitted(drafter: Drafter, noise: Noise) -> tuple[int, ...]:
    """Return the first tokens of a reply made in speculative rounds."""
    history: tuple[int, ...] = ()
    while len(history) < LENGTH:
        proposal = drafter(history, noise)
        rows = [draw(history, noise)]
        for node in range(len(proposal)):
            ahead = history + tuple(path_tokens(proposal, node))
            rows.append(draw(ahead, noise) if len(ahead) < LENGTH else 0)
        history += tuple(walk(proposal, rows).tokens)
    return history[:LENGTH]


def full_tree(_: tuple[int, ...], __: Noise) -> Proposal:
    return Proposal([0, 1, 2, 3, 0, 1, 2, 3], [-1, -1, -1, -1, 2, 2, 2, 2], "tree")


def knows_the_noise(history: tuple[int, ...], noise: Noise) -> Proposal:
    """Is right, except that it never proposes token 0: it tries to keep 0 out of the reply."""
    proposed: tuple[int, ...] = ()
    while len(history) + len(proposed) < LENGTH:
        token = draw(history + proposed, noise)
        proposed += (token or 3,)
    return chain(proposed, "cheat")


def trims_by_value(history: tuple[int, ...], noise: Noise) -> Proposal:
    """Cuts its draft tokens from the first 2 on: safe under this rule (the trimming law)."""
    proposed = knows_the_noise(history, noise).tokens
    return chain(proposed[: proposed.index(2)] if 2 in proposed else proposed, "trimmed")


DRAFTERS: dict[str, Drafter] = {
    "none": lambda _, __: EMPTY,
    "always 2": lambda _, __: chain([2, 2, 2], "constant"),
    "always 0": lambda _, __: chain([0, 0, 0], "constant"),
    "tree": full_tree,
    "knows the noise": knows_the_noise,
    "trims by value": trims_by_value,
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_emitted_law_is_the_targets_exactly(name: str) -> None:
    """Law: over all outcomes of the noise on a four-token vocabulary, in fractions, every reply of
    three tokens has exactly the target's probability, also with a drafter that sees the noise; for
    each noise it is the reply of plain decoding."""
    law: Counter[tuple[int, ...]] = Counter()
    for noise in product(range(ATOMS), repeat=LENGTH):
        reply = emitted(DRAFTERS[name], noise)
        assert reply == emitted(DRAFTERS["none"], noise)
        law[reply] += 1
    for reply in product(range(4), repeat=LENGTH):
        exact = math.prod(
            (Fraction(target_law(reply[:i])[reply[i]], ATOMS) for i in range(LENGTH)),
            start=Fraction(1),
        )
        assert Fraction(law[reply], ATOMS**LENGTH) == exact


# -- with the real sampler -------------------------------------------------------------------

VOCAB = 16


def table(seed: int) -> torch.Tensor:
    """Return logits that depend on the last two tokens."""
    return torch.randn(VOCAB, VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def logits_of(model: torch.Tensor, contexts: list[RowContext]) -> torch.Tensor:
    rows = []
    for context in contexts:
        tokens = context.seq.tokens + context.path
        rows.append(model[tokens[-2], tokens[-1]])
    return torch.stack(rows)


def random_tree(right: list[int], size: int, generator: torch.Generator) -> Proposal:
    """Return a wrong and a right node at each depth of `right`, then nodes anywhere."""
    tokens, parents, parent = list[int](), list[int](), -1
    for token in right:
        tokens += [(token + 1) % VOCAB, token]
        parents += [parent, parent]
        parent = len(tokens) - 1
    for node in range(len(tokens), size):
        tokens.append(int(torch.randint(0, VOCAB, (1,), generator=generator)))
        parents.append(int(torch.randint(-1, node, (1,), generator=generator)))
    return Proposal(tokens, parents, "random")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0.7, "top_p": 0.9, "presence_penalty": 1.0, "repetition_penalty": 1.3},
    ],
)
def test_speculative_rounds_emit_what_plain_decoding_emits(
    seed: int, fields: dict[str, float]
) -> None:
    """Law: three sequences in one batch, with random trees, half-right chains and no draft tokens,
    equal the same sequences alone and one token at a time."""
    model, generator = table(seed), torch.Generator().manual_seed(100 + seed)
    sequences = [
        Sequence(str(i), SamplingParams(seed=i, max_tokens=99, **fields), [i, 1], 2)  # type: ignore[arg-type]
        for i in range(3)
    ]
    plain = [alone(model, seq, 40) for seq in sequences]
    draws = DeviceDraws(LogitsProcessor([0]), VOCAB, torch.device("cpu"))
    while min(seq.num_tokens for seq in sequences) < 30:
        known = [plain[i][seq.num_tokens :][:2] for i, seq in enumerate(sequences)]
        wild = int(torch.randint(0, VOCAB, (1,), generator=generator))
        tree = random_tree(known[0], 9, generator)
        proposals = [tree, chain([*known[1], wild], "half"), EMPTY]
        contexts = [
            RowContext(seq, path_tokens(proposal, node))
            for seq, proposal in zip(sequences, proposals, strict=True)
            for node in range(-1, len(proposal))
        ]
        drawn = iter(draws.draw_adjusted(logits_of(model, contexts), contexts))
        results = [walk(each, [next(drawn) for _ in range(1 + len(each))]) for each in proposals]
        for seq, result in zip(sequences, results, strict=True):
            assert len(result.tokens) == len(result.path) + 1
            seq.tokens += result.tokens
        assert all(len(results[i].path) >= len(known[i]) for i in (0, 1))
    for seq, expected in zip(sequences, plain, strict=True):
        assert seq.tokens[:30] == expected[:30]


def alone(model: torch.Tensor, seq: Sequence, length: int) -> list[int]:
    copy = Sequence(seq.id, seq.params, list(seq.tokens), seq.num_prompt)
    while copy.num_tokens < length:
        contexts = [RowContext(copy, [])]
        log_probs = finalize(LogitsProcessor([0]), logits_of(model, contexts), contexts)
        copy.tokens.append(int(sample(log_probs, contexts)))
    return copy.tokens
