"""The draw in two kernel launches equals torch's. The kernels run interpreted on a CPU, and are
compiled for a GPU that need not exist."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from engine.messages import SamplingParams
from engine.sampling.device_draws import DeviceDraws, best_and_margin, draw_survivors, params_in
from engine.sampling.logits import LogitsProcessor
from engine.sampling.logprobs import scores as scores_by_torch
from engine.sampling.noise import gumbel_of, hashed, token_words_of
from engine.sampling.plain import NOT_FINITE, UNDECIDED, Rows
from engine.sampling.row_params import RowParams
from engine.sampling.token_counts import adjusted as by_torch
from engine.sampling.triton_draws import has_kernels
from engine.scheduling.sequence import Sequence
from tests.support.interpreted_draws import (
    RANKED,
    Array,
    Interpreted,
    adjusted,
    drafted_fused,
    drawn,
    noise,
    scored,
    survivors,
    words,
)
from tests.support.row_noise import Key, gumbel, key_columns

pytest.importorskip("triton", reason="needs Triton, which comes with torch for CUDA")

KEYS: list[Key] = [(0, 0), (1, 0), (0, 1), (2**64 - 1, 2**20), (12345678901234567890, 4095), (7, 7)]
ROWS = len(KEYS)
FILTERED = RowParams._fields.index("filtered")
LOUD = np.array([True, True, False, True, True, False])
SCALES = np.array([1.0, 0.7, 1.0, 3.0, 1.0, 1.0])
WIDTHS = [1, 2, 1024, 1025, 5000]  # a block is 1024


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Interpreted]:
    found = Interpreted()
    yield found
    found.close()


def halves(keys: list[Key]) -> tuple[Array, Array]:
    low, high = (half.view(np.int32) for half in key_columns(keys))
    return low, high


def normal(width: int, seed: int = 4) -> npt.NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal((ROWS, width)) * 4).astype(np.float32)


def agree(interpreted: Interpreted, logits: Array) -> Array:
    """Return the tokens, after checking that they, the margins and the second-best tokens are
    torch's."""
    scales = SCALES.astype(np.float32)[:, None]
    quiet = [key if has_noise else None for key, has_noise in zip(KEYS, LOUD, strict=True)]
    scores = torch.from_numpy(logits * scales) + gumbel(quiet, logits.shape[1])
    tokens, margins, second_best = (found.numpy() for found in best_and_margin(scores))
    found = interpreted(drawn, logits, scales, *halves(KEYS), LOUD[:, None])
    assert found.dtype == np.float64
    drawn_tokens, drawn_margins, drawn_second = found
    assert drawn_tokens.tolist() == tokens.tolist()
    assert np.array_equal(drawn_second[tokens >= 0], second_best[tokens >= 0])
    assert np.abs(drawn_margins - margins).max() < 1e-5
    return np.asarray(drawn_tokens)


def test_the_hash_is_the_same(interpreted: Interpreted) -> None:
    """Law: bit for bit; otherwise a seed would give another text on a GPU."""
    low, high = halves(KEYS)
    expected = hashed(token_words_of(5000), torch.from_numpy(low), torch.from_numpy(high))
    found = interpreted(words, np.arange(5000, dtype=np.int32), low[:, 0], high[:, 0])
    assert np.array_equal(found, expected.numpy())
    last = np.arange(262_144 - 64, 262_144, dtype=np.int32)  # ids whose products wrap around often
    expected = hashed(token_words_of(262_144)[-64:], *(torch.from_numpy(x) for x in (low, high)))
    assert np.array_equal(interpreted(words, last, low[:, 0], high[:, 0]), expected.numpy())


def test_the_logarithms_differ_in_the_last_bits(interpreted: Interpreted) -> None:
    """Law: they differ from the definition by at most two units in the last place of 1, or of the
    value if larger, also at both ends of the words and where the noise changes sign."""
    generator = np.random.default_rng(1)
    some = [np.arange(4096), 2**31 - 1 - np.arange(4096), int(2**31 * 0.632) + np.arange(4096)]
    spread = 2 ** (generator.random(2**16) * 31)
    given = np.concatenate([*some, generator.integers(0, 2**31, 2**18), spread.astype(np.int64)])
    given = given.astype(np.int32)
    found = interpreted(noise, given).astype(np.float64)
    u = given.astype(np.float32) * np.float32(2.0**-31) + np.float32(2.0**-32)
    u = np.minimum(u, np.float32(1 - 2.0**-24)).astype(np.float64)
    expected = -np.log(-np.log1p(-u))
    assert (np.abs(found - expected) / np.maximum(np.abs(expected), 1)).max() < 2**-22
    theirs = gumbel_of(torch.from_numpy(given)).numpy()
    assert (np.abs(found - theirs) / np.maximum(np.abs(expected), 1)).max() < 2**-22


@pytest.mark.parametrize("width", WIDTHS)
def test_tokens_and_leads_are_the_same(interpreted: Interpreted, width: int) -> None:
    """Law: for rows with noise and without, at any width, also where logits tie."""
    logits = normal(width)
    logits[::2] = np.round(logits[::2])
    agree(interpreted, logits)


def test_ties_go_to_the_lowest_id(interpreted: Interpreted) -> None:
    """Law: within a block and between blocks; zeros of both signs are equal."""
    logits = normal(2100)
    logits[[2, 2, 2, 2], [2050, 1030, 1029, 2099]] = 50.0
    logits[5] = np.where(np.arange(2100) < 1500, -1.0, 0.0)
    logits[5, 1500:1600] = -0.0
    tokens = agree(interpreted, logits)
    assert (tokens[2], tokens[5]) == (1029, 1500)


@pytest.mark.parametrize("number", [np.nan, -np.nan, np.inf, -np.inf])
def test_non_finite_numbers(interpreted: Interpreted, number: float) -> None:
    """Law: a row whose largest score is not finite has no token, and a margin only over what an
    infinity leaves. Cases: one, the last, two of two blocks, two of one, all, all but one."""
    logits = normal(1100)
    places = [[0], [1099], [1023, 1024], [7, 8], list(range(1100)), list(range(1, 1100))]
    for row, some in enumerate(places):
        logits[row, some] = number
    tokens = agree(interpreted, logits)
    none = [number != -np.inf or row == 4 for row in range(ROWS)]
    assert (tokens == NOT_FINITE).tolist() == none


def test_columns_may_lie_in_one_float64_array(interpreted: Interpreted) -> None:
    """Law: columns may be views of one float64 array, as `device_draws` sends them."""
    logits, (low, high) = normal(300), halves(KEYS)
    table = np.zeros((ROWS, 7))
    for column, numbers in enumerate((SCALES, LOUD, low[:, 0], high[:, 0])):
        table[:, column] = numbers
    found = interpreted(drawn, logits, table[:, :1], table[:, 2:3], table[:, 3:4], table[:, 1:2])
    scales = SCALES.astype(np.float32)
    assert np.array_equal(found, interpreted(drawn, logits, scales, low, high, LOUD))


def test_draws_on_the_device_use_these_kernels(interpreted: Interpreted) -> None:
    """Law: where the kernels can run, they make all draws without filters."""
    logits = normal(1100)
    found, expected = interpreted(drafted_fused, logits, True), drafted_fused(logits, False)
    assert found[0].tolist() == expected[0].tolist()
    assert np.abs(found[1] - expected[1]).max() < 1e-4


@pytest.mark.parametrize("across", [False, True])
def test_penalties_are_the_same(interpreted: Interpreted, across: bool) -> None:
    """Law: bit for bit, after draft tokens and without, for rows with some penalties, all or none,
    whether a row's or an adjustment's numbers are contiguous."""
    generator, width = np.random.default_rng(3), 1100
    logits = normal(width)
    logits[3, :9] = -np.inf
    seen = generator.integers(0, 16, (4, width)).astype(np.int32)
    biases = np.round(generator.standard_normal((4, width))).astype(np.float32)
    seen[0], biases[0] = 0, 0
    ids = np.array([5, 5, 1099, 1023, 7, 8, 5])
    fields = np.array(
        [  # slot, first draft token, draft tokens, early, repetition, frequency, presence
            [0, 0, 3, 0, 1, 0, 0],
            [1, 0, 3, 1, 1.3, 0.7, -0.4],
            [2, 3, 2, 0, 0.7, -1.1, 0],
            [3, 5, 0, 1, 1, 0, 0.3],
            [1, 0, 0, 0, 1, 0.1, 0.1],
            [2, 3, 4, 0, 1.9, 0, 0],
        ]
    )
    fields = np.asfortranarray(fields).astype(np.float32) if across else fields
    texts = torch.from_numpy(seen), torch.from_numpy(biases)
    there = torch.from_numpy(fields.T.copy()).T if across else torch.from_numpy(fields)
    expected = by_torch(torch.from_numpy(logits), texts, there, torch.from_numpy(ids), 4).numpy()
    found = interpreted(adjusted, logits, seen, biases, fields, ids)
    assert np.array_equal(found, expected)
    assert np.array_equal(found[0], logits[0])


@pytest.mark.parametrize(("width", "count"), [(50, 0), (50, 3), (230, 40)])
def test_log_probabilities_are_the_same(interpreted: Interpreted, width: int, count: int) -> None:
    """Law: ids and ranks are exact, ties go to the lower id, whether a row is one piece or several;
    NOT_FINITE counts as id 0."""
    logits = normal(width)
    logits[1:4] = np.round(logits[1:4])
    logits[3, ::2], logits[3, ::3] = -np.inf, -0.0
    rows, tokens = np.array([0, 1, 3, 3, 5]), np.array([3.0, 40, 6, 1, NOT_FINITE])
    own, at, ids = (torch.from_numpy(array) for array in (logits, rows, tokens))
    expected = scores_by_torch(own, at, ids, count).numpy()
    found = interpreted(scored, logits, rows, tokens, np.array(count))
    assert np.array_equal(found[:, 1 : 2 + count], expected[:, 1 : 2 + count])
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_filtered_draws_are_the_same(interpreted: Interpreted) -> None:
    """Law: tokens, margins, second-best tokens, and the flag that more tokens may survive than are
    inspected, are equal under each filter alone and all together, also where logits tie, are few,
    or are not finite. A row without filters is unchanged, and so is a token that is not sure."""
    filters: list[dict[str, Any]] = [
        {"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 60, "top_p": 0.9, "min_p": 0.01},
        {"top_p": 0.9999, "temperature": 9.0}, {"min_p": 0.05, "temperature": 0.3}, {"top_p": 0.02},
        {"top_k": 1},
    ]  # fmt: skip
    params = [SamplingParams(seed=i, max_tokens=9, **each) for i, each in enumerate(filters * 3)]
    seqs = [Sequence(str(i), each, [1], 1) for i, each in enumerate(params)]
    batch = [Rows(seq, i, 1, 1) for i, seq in enumerate(seqs)]
    draws = DeviceDraws(LogitsProcessor([0]), 100, torch.device("cpu"))
    logits = (np.random.default_rng(9).standard_normal((24, 100)) * 3).astype(np.float32)
    logits[8:16] = np.round(logits[8:16])
    logits[16:, 4:] = -np.inf
    logits[16, 1], logits[17, 2], logits[18, 0], logits[19] = np.nan, -np.nan, np.inf, -np.inf
    table = draws.plan(batch).table
    for width in (100, 60):
        logits, words = np.ascontiguousarray(logits[:, :width]), token_words_of(width)
        row_params, num_ranked = params_in(torch.from_numpy(table)), min(width, RANKED)
        expected = draw_survivors(torch.from_numpy(logits), words, row_params, num_ranked).numpy()
        tokens, margins, second_best = expected
        table[5, FILTERED] = 0
        tokens[5] = margins[5] = second_best[5] = 7
        found = interpreted(survivors, logits, table, False)
        assert found[0].tolist() == tokens.tolist()
        drafted = interpreted(survivors, logits[4:5], table[4:5], True)
        assert np.array_equal(drafted, [[7], [7], [7]] if tokens[4] == UNDECIDED else found[:, 4:5])
        assert (UNDECIDED in tokens) == (width > num_ranked)
        sure = tokens >= 0
        assert np.abs(found[1] - margins)[sure].max() < 1e-5
        assert np.array_equal(found[2][sure], second_best[sure])
        assert -1 in second_best[sure]  # one token survives


def test_parts_without_a_logit_count_nothing(interpreted: Interpreted) -> None:
    """Bug: beside logits that are far below 0 at a low temperature, a part of the row in which a
    grammar forbids every token gave 0 x infinity, and nothing could be drawn."""
    seq = Sequence("", SamplingParams(seed=3, max_tokens=9, temperature=0.01, top_p=0.9), [1], 1)
    table = DeviceDraws(LogitsProcessor([0]), 100, torch.device("cpu")).plan([Rows(seq, 0, 1, 1)])
    logits = np.full((1, 100), -np.inf, np.float32)
    logits[0, [70, 80]] = -9.0, -9.001
    expected = draw_survivors(
        torch.from_numpy(logits), token_words_of(100), params_in(torch.from_numpy(table.table)), 100
    )
    found = interpreted(survivors, logits, table.table, False)
    assert found[0].tolist() == expected[0].tolist()
    assert found[0] >= 70


def test_the_law_of_draws(interpreted: Interpreted) -> None:
    """Law: chi-square of 100 draws with 3 degrees of freedom exceeds 22 once in 15 000 cases. The
    interpreter is slow, so draws are few."""
    shares = np.array([0.4, 0.3, 0.2, 0.1])
    keys: list[Key] = [(seed, 3) for seed in range(100)]
    ones = np.ones(len(keys), np.float32)
    logits = np.tile(np.log(shares).astype(np.float32), (len(keys), 1))
    tokens = interpreted(drawn, logits, ones, *halves(keys), ones)[0].astype(int)
    counts, expected = np.bincount(tokens, minlength=4), shares * len(keys)
    assert ((counts - expected) ** 2 / expected).sum() < 22


def test_it_compiles_for_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: for all arguments of `device_draws` and of a chain; logits are read 16 bytes at a time,
    and no product is fused with a sum, so the GPU gives the interpreter's numbers."""
    import triton
    from triton.backends.compiler import GPUTarget

    from engine.sampling import triton_kernels as kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def compiled(kernel: Any, pointers: dict[str, str], constants: dict[str, Any]) -> str:
        types = pointers | dict.fromkeys(constants, "constexpr")
        apart = {"of_row": "i32"} if "of_row" in kernel.arg_names else {}
        aligned = {(2,): [["tt.divisibility", 16]]} if "logits" in pointers else {}
        source = triton.compiler.ASTSource(kernel, types | apart, constants, aligned)
        made = triton.compile(source, GPUTarget("cuda", 90, 32), kernels.OPTIONS)
        assert made.asm["cubin"]
        return str(made.asm["ptx"])

    columns: tuple[str, ...] = ("scales", "low", "high", "has_noise")
    for kinds in (("*fp64",) * 4, ("*fp32", "*i32", "*i32", "*i1")):
        for logits, wide in (("*fp32", "ld.global.v4.b32"), ("*bf16", "ld.global.v4.b32")):
            pointers = {"tops": "*fp32", "ids": "*i32", "logits": logits}
            pointers |= dict(zip(columns, kinds, strict=True))
            text = compiled(kernels.best_of_blocks, pointers, {"WIDTH": 128_256})
            assert wide in text
            assert "fma." not in text
    pointers = {"out": "*fp32", "logits": "*fp32", "seen": "*i32", "biases": "*fp32", "ids": "*i64"}
    for kind in ("*fp64", "*fp32"):
        pointers |= {"fields": kind, "of_row": "i32", "of_column": "i32"}
        text = compiled(kernels.adjust_blocks, pointers, {"WIDTH": 128_256})
        assert "ld.global.v4.b32" in text
    left = {"tops": "*i64", "sums": "*fp32"}
    sizes = {"WIDTH": 128_256, "KEPT": 1024}
    pieces, parts = {**sizes, "COUNT": 1024, "STEPS": 8}, {**sizes, "PARTS": 16, "LANES": 16}
    columns = ("scales", "filtered", "low", "high", "sizes", "shares", "floors")
    own = {"scales": "*fp64", "filtered": "*fp64"}
    none = {"rows": None, "tokens": None}
    compiled(kernels.top_of_parts, {**left, "logits": "*bf16", **own}, {**pieces, **none})
    requested = {"logits": "*fp32", "rows": "*i64", "tokens": "*fp64"}
    few = {"KEPT": 32}
    without = {"scales": None, "filtered": None}
    compiled(kernels.top_of_parts, {**left, **requested}, {**pieces, **few, **without})
    given = {"scores": "*fp64", **left, **requested, "count": "i32"}
    compiled(kernels.scores_of_rows, given, parts | few)
    given = {"drawn": "*fp64", **left, **dict.fromkeys(columns[1:], "*fp64")}
    compiled(kernels.best_of_likeliest, given, {**parts, "FOR_DRAFT": 1})
    pointers = {"drawn": "*fp64", "tops": "*fp32", "ids": "*i32"}
    compiled(kernels.best_of_rows, pointers, {"BLOCKS": 126, "LANES": 128})


def test_a_cpu_draws_by_torch() -> None:
    assert not has_kernels(torch.device("cpu"))
    assert not has_kernels(torch.device("meta"))
