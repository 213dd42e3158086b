"""Keyed Gumbel noise: a function of (seed, position, token) with the right distribution.

The keys are fixed, so each test passes or fails for good; the rates below are the chance that a
perfect generator would have failed when the keys were chosen."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from engine.sampling.noise import (
    gumbel_of,
    hashed,
    key_halves,
    splitmix64,
    token_words_of,
    words_of,
)
from tests.support import reference_noise
from tests.support.row_noise import Key, gumbel, key_columns, row_key

VOCAB = 4096
ROWS = 256
SIGMAS = 6.0  # two-sided chance of a false alarm: 2e-9 per comparison

EULER_GAMMA = 0.5772156649015329
GUMBEL_VARIANCE = math.pi**2 / 6
# Fourth central moment 27 pi^4 / 180 over the squared variance.
KURTOSIS = 5.4


def rows(keys: Sequence[Key]) -> torch.Tensor:
    return gumbel(keys, VOCAB).double()


BY_POSITION = [(7, position) for position in range(ROWS)]
BY_SEED = [(seed, 1000) for seed in range(ROWS)]


@pytest.mark.parametrize("keys", [BY_POSITION, BY_SEED])
def test_moments_are_those_of_a_standard_gumbel(keys: list[Key]) -> None:
    """Law: mean Euler's gamma, variance pi^2/6, over neighbouring positions and neighbouring seeds;
    overall and in each row (false alarm: 1e-6 in all)."""
    noise = rows(keys)
    n = noise.numel()
    assert abs(noise.mean().item() - EULER_GAMMA) < SIGMAS * math.sqrt(GUMBEL_VARIANCE / n)
    spread = GUMBEL_VARIANCE * math.sqrt((KURTOSIS - 1) / n)
    assert abs(noise.var().item() - GUMBEL_VARIANCE) < SIGMAS * spread
    per_row = (noise.mean(dim=1) - EULER_GAMMA).abs().max().item()
    assert per_row < SIGMAS * math.sqrt(GUMBEL_VARIANCE / VOCAB)


@pytest.mark.parametrize("keys", [BY_POSITION, BY_SEED])
def test_the_distribution_function_is_that_of_a_gumbel(keys: list[Key]) -> None:
    """Law: Kolmogorov-Smirnov over a million values: 2 exp(-2 * 3.5^2) = 5e-11 false alarms."""
    noise = rows(keys).flatten().sort().values
    n = len(noise)
    expected = torch.exp(-torch.exp(-noise))
    empirical = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    assert (expected - empirical).abs().max().item() * math.sqrt(n) < 3.5


@pytest.mark.parametrize("keys", [BY_POSITION, BY_SEED])
def test_neighbouring_keys_and_tokens_are_uncorrelated(keys: list[Key]) -> None:
    """Law: rows of consecutive positions or seeds, and columns of consecutive tokens; all 32 640
    pairs of rows at once (false alarm: 7e-5), then lagged products overall (2e-9 each)."""
    noise = (rows(keys) - EULER_GAMMA) / math.sqrt(GUMBEL_VARIANCE)
    between = noise @ noise.T / VOCAB
    between.fill_diagonal_(0)
    assert between.abs().max().item() < SIGMAS / math.sqrt(VOCAB)
    for lag in (1, 2, 3, 64):
        tokens = (noise[:, lag:] * noise[:, :-lag]).mean().item()
        assert abs(tokens) < SIGMAS / math.sqrt(ROWS * (VOCAB - lag))
        keyed = (noise[lag:] * noise[:-lag]).mean().item()
        assert abs(keyed) < SIGMAS / math.sqrt((ROWS - lag) * VOCAB)


def test_four_way_products_vanish() -> None:
    """Bug: a hash joining row and token by xor alone correlates g(a,i) g(a,j) g(b,i) g(b,j)."""
    noise = (rows(BY_POSITION) - EULER_GAMMA) / math.sqrt(GUMBEL_VARIANCE)
    pairs = noise[:, 0::2] * noise[:, 1::2]
    product = (pairs[0::2] * pairs[1::2]).mean().item()
    assert abs(product) < SIGMAS / math.sqrt(pairs.numel() / 2)


def test_avalanche_of_the_row_key() -> None:
    """Law: each bit of seed and position flips each bit of the key half the time (2e-9 each)."""
    count = 256
    for bit in range(64):
        for flip in ((1 << bit, 0), (0, 1 << bit)):
            flips = np.zeros(64)
            for i in range(count):
                changed = row_key(i, i * i) ^ row_key(i ^ flip[0], (i * i) ^ flip[1])
                flips += [(changed >> b) & 1 for b in range(64)]
            assert np.abs(flips - count / 2).max() < SIGMAS * math.sqrt(count) / 2 + 1


def test_equals_its_definition_in_plain_integers() -> None:
    """Law: the hash never changes, since a seed must give the same text in all versions."""
    keys = [(0, 0), (1, 0), (0, 1), (2**64 - 1, 2**20), (12345678901234567890, 4095)]
    noise = gumbel(keys, 300)
    for row, (seed, position) in zip(noise, keys, strict=True):
        expected = torch.from_numpy(reference_noise.gumbel(seed, position, 300))
        torch.testing.assert_close(row.double(), expected, rtol=1e-5, atol=1e-5)


def test_keys_of_many_rows_are_those_of_each() -> None:
    """Law: also at both ends of the ranges of seeds and positions; wrap-around is no error."""
    seeds, positions = [0, 1, 2**63, 2**64 - 1, 12345678901234567890], [0, 1, 2**20, 7, 4095]
    low, high = key_halves(splitmix64(np.array(seeds, np.uint64)), np.array(positions)).T
    columns = key_columns(list(zip(seeds, positions, strict=True)))
    for half, column in zip((low, high), columns, strict=True):
        assert half.view(np.uint32).tolist() == column[:, 0].tolist()


def test_no_word_gives_an_infinity_and_the_upper_tail_is_exact() -> None:
    """Law: u rounds to 1 in float32 for the largest words, and near 0 float32 must not lose u."""
    words = torch.tensor([0, 1, 2, 1000, 2**24 + 1, 2**31 - 2, 2**31 - 1], dtype=torch.int32)
    noise = gumbel_of(words)
    assert noise.isfinite().all()
    u = np.minimum((words.numpy().astype(np.float64) + 0.5) / 2**31, 1 - 2.0**-24)
    expected = -np.log(-np.log1p(-u))
    assert np.abs(noise.numpy() - expected).max() < 1e-5
    assert noise[0].item() == pytest.approx(32 * math.log(2), abs=1e-5)


def test_different_vocabularies_share_their_common_ids() -> None:
    """Law: a draft of another vocabulary size draws with the same noise for the same token."""
    assert torch.equal(gumbel([(3, 9)], 100)[0, :64], gumbel([(3, 9)], 64)[0])


def test_a_row_without_a_key_is_silent() -> None:
    """Law: a greedy row gets zeros, and other rows get the noise they would get alone."""
    noise = gumbel([(5, 1), None, (5, 2)], 33)
    assert not noise[1].any()
    assert torch.equal(noise[[0, 2]], torch.cat([gumbel([(5, 1)], 33), gumbel([(5, 2)], 33)]))


def close_pairs(vocab_size: int) -> np.ndarray:
    """Return ids [n, 2] of all pairs whose token words differ in one or two bits, or only in the
    highest four. Words of the first kind agree in one of three parts, those of the second in the
    lowest, so only pairs within groups that share a part are compared."""
    words = words_of(vocab_size)
    found = []
    for part in (0x7FF, 0x7FF << 11, 0x3FF << 22):
        order = np.argsort(words & np.uint32(part), kind="stable")
        grouped = (words & np.uint32(part))[order]
        for lag in range(1, vocab_size):
            first = np.flatnonzero(grouped[lag:] == grouped[:-lag])
            if not len(first):
                break
            pair = np.stack([order[first], order[first + lag]], axis=1)
            change = words[pair[:, 0]] ^ words[pair[:, 1]]
            rest = change & (change - np.uint32(1))  # clear the lowest bit
            few = (rest & (rest - np.uint32(1))) == 0
            found.append(pair[few | (change & np.uint32(0x0FFFFFFF) == 0)])
    return np.unique(np.sort(np.concatenate(found), axis=1), axis=0)


def noise_of_pairs(pairs: np.ndarray, keys: Sequence[Key]) -> tuple[np.ndarray, np.ndarray]:
    """Return the noise of both tokens of each pair, [keys, pairs] each."""
    words = token_words_of(int(pairs.max()) + 1)
    low, high = (torch.from_numpy(half.view(np.int32)) for half in key_columns(keys))
    first, second = (
        gumbel_of(hashed(words[torch.from_numpy(ids)], low, high)).double().numpy()
        for ids in pairs.T
    )
    return first, second


@pytest.mark.parametrize("vocab_size", [128_256, 151_936, 262_144])
def test_tokens_whose_words_hardly_differ_are_independent(vocab_size: int) -> None:
    """Bug: two rounds left words that differ only in high bits correlated. Checks each pair's
    correlation, and a law of 0.9 to 0.1 over each pair (false alarm: 2e-9 each, 3e-5 in all)."""
    keys = [(seed, 5) for seed in range(2000)]
    pairs = close_pairs(vocab_size)
    assert len(pairs) > vocab_size**2 / 2**33 * 400  # 528 changes of one or two bits
    for some in np.array_split(pairs, 8):
        first, second = noise_of_pairs(some, keys)
        product = ((first - EULER_GAMMA) * (second - EULER_GAMMA)).mean(0) / GUMBEL_VARIANCE
        assert np.abs(product).max() < SIGMAS / math.sqrt(len(keys))
        wins = (first + math.log(9) > second).mean(0)
        assert np.abs(wins - 0.9).max() < SIGMAS * math.sqrt(0.09 / len(keys))


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99])
def test_laws_over_pairs_that_differ_in_the_highest_bits(share: float) -> None:
    """Law: for all such pairs of the largest vocabulary, many keys (false alarm: 2e-9 each)."""
    pairs = close_pairs(262_144)
    words = words_of(262_144)
    change = words[pairs[:, 0]] ^ words[pairs[:, 1]]
    highest = pairs[change & np.uint32(0x1FFFFFFF) == 0]
    assert [11773, 110876] in highest.tolist()
    keys = [(7, position) for position in range(30_000)]
    first, second = noise_of_pairs(highest, keys)
    wins = (first + math.log(share / (1 - share)) > second).mean(0)
    bound = SIGMAS * math.sqrt(share * (1 - share) / len(keys))
    assert np.abs(wins - share).max() < bound
