"""Compiled CPU attention against the reference backend, and against itself in other batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.attention.interface import LayerShape, Span, Variation
from engine.attention.sdpa import SdpaBackend
from engine.cpu.attention import MOST_THREADS, CompiledBackend
from engine.cpu.vectors import LANES
from engine.errors import ConfigError
from engine.model.attention_choice import choose_attention
from engine.model.kv_cache import Plane
from engine.scheduling.segment import ancestors_of

CPU = torch.device("cpu")
SLOTS = 1920
PLAIN: dict[str, Any] = {"scaling": None, "window": None, "softcap": None, "sinks": None}
TREE = ancestors_of([-1, 0, 0, 1, -1, 4, 2, 6])
DTYPES = [torch.float32, torch.bfloat16]
# (start, rows, tree): decodes, verifications, trees and chunks, around the edges of tiles of 32.
SEGMENTS = [
    (0, 1, False), (30, 1, False), (31, 1, False), (32, 1, False), (63, 2, False), (95, 1, False),
    (200, 5, False), (28, 9, False), (20, 9, True), (60, 11, True), (0, 9, True), (7, 64, False),
    (0, 33, False),
]  # fmt: skip
CHUNKS = [
    (40, 3, False), (10, 70, False), (0, 1, False), (0, 130, False), (33, 2, False),
    (5, 72, True), (0, 66, True),
]  # fmt: skip
Segments = list[tuple[int, int, bool]]


class Case:
    """A plane of random keys and values, and spans over it whose blocks are scattered."""

    def __init__(
        self,
        dtype: torch.dtype,
        *,
        heads: int,
        kv_heads: int,
        dim: int,
        size: int,
        segments: Segments,
    ) -> None:
        self.generator = torch.Generator().manual_seed(0)
        shapes, count = [LayerShape(0, kv_heads, dim, dim)], SLOTS // size
        self.plane = Plane(shapes, count, block_size=size, dtype=dtype, device=CPU)
        for tensor in self.plane.stacks[0]:
            tensor.copy_(self.random(*tensor.shape))
        free = torch.randperm(count, generator=self.generator).tolist()
        self.spans: list[Span] = []
        row = 0
        for start, rows, tree in segments:
            blocks = [free.pop() for _ in range(-(-(start + rows) // size))]
            self.spans.append(Span(row, rows, start, blocks, TREE if tree else None))
            row += rows
        self.rows = [self.random(1, n, row, dim).to(dtype) for n in (heads, kv_heads, kv_heads)]

    def random(self, *size: int) -> Tensor:
        return torch.randn(*size, generator=self.generator)

    def attend(self, backend: Any, spans: list[Span] | None = None, **variation: Any) -> Tensor:
        """Return the attention output of `spans` (default: all); rows keep their index."""
        spans = self.spans if spans is None else spans
        chosen = torch.cat([torch.arange(s.row, s.row + s.length) for s in spans])
        moved, row = [], 0
        for span in spans:
            moved.append(Span(row, span.length, span.start, span.blocks, span.ancestors))
            row += span.length
        parts = [part[:, :, chosen] for part in self.rows]
        prepared = backend.prepare(self.plane, moved)
        found: Tensor = prepared.run(0, *parts, Variation(**{**PLAIN, **variation}))
        return found


def case(dtype: torch.dtype, *, segments: Segments = SEGMENTS, **shape: int) -> Case:
    return Case(
        dtype, **{"heads": 4, "kv_heads": 2, "dim": 32, "size": 4, **shape}, segments=segments
    )


def exact(given: Case) -> Tensor:
    """Return what the reference computes in float32 on the same numbers."""
    plane = given.plane
    given.plane = Plane(
        [LayerShape(0, *(plane.stacks[0][0].shape[i] for i in (1, 3, 3)))],
        plane.stacks[0][0].shape[2] // plane.block_size,
        block_size=plane.block_size,
        dtype=torch.float32,
        device=CPU,
    )
    for copy, tensor in zip(given.plane.stacks[0], plane.stacks[0], strict=True):
        copy.copy_(tensor)
    rows, given.rows = given.rows, [part.float() for part in given.rows]
    found = given.attend(SdpaBackend(CPU))
    given.plane, given.rows = plane, rows
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"heads": 3, "kv_heads": 3, "dim": 96, "size": 5},
        {"heads": 16, "dim": 64, "size": 16},
        {"heads": 5, "kv_heads": 1, "dim": 160, "size": 64},
        {"segments": CHUNKS},
    ],
    ids=["grouped", "a head each", "eight share", "one for all", "with long chunks"],
)
def test_it_attends_as_sdpa(dtype: torch.dtype, shape: dict[str, Any]) -> None:
    """Law: compiled attention gives the output of SDPA for all kinds of rows in one call, and
    writes the same keys and values to the same slots."""
    given = case(dtype, **shape)
    expected = exact(given)
    before = [tensor.clone() for tensor in given.plane.stacks[0]]
    given.attend(SdpaBackend(CPU))
    written = [tensor.clone() for tensor in given.plane.stacks[0]]
    for tensor, old in zip(given.plane.stacks[0], before, strict=True):
        tensor.copy_(old)
    found = given.attend(CompiledBackend())
    assert found.dtype == dtype
    assert all(map(torch.equal, given.plane.stacks[0], written))
    allowed = 2e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.float(), expected, rtol=allowed, atol=allowed)


@pytest.mark.parametrize("segments", [SEGMENTS, CHUNKS], ids=["few rows", "with long chunks"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_batch_invariant(dtype: torch.dtype, segments: Segments) -> None:
    """Law: a row does not change with the other sequences, with the other rows of its own sequence,
    or with how a prompt is cut into chunks."""
    given, backend = case(dtype, segments=segments), CompiledBackend()
    together = given.attend(backend)
    for span in given.spans:
        alone = given.attend(backend, [span])
        assert torch.equal(alone[0], together[0, span.row : span.row + span.length])
        if span.ancestors:
            continue
        for i in range(span.length):  # keys of all spans are already in the plane
            one = Span(span.row + i, 1, span.start + i, span.blocks)
            assert torch.equal(given.attend(backend, [one])[0, 0], together[0, span.row + i])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_key_that_is_not_a_number_spoils_its_own_sequence(
    dtype: torch.dtype,
) -> None:
    """Law: NaN keys give NaN rows in their own sequence only; other sequences are unaffected."""
    given, backend = case(dtype), CompiledBackend()
    clean = given.attend(backend)
    bad = given.spans[6]
    for tensor in given.plane.stacks[0]:
        tensor[:, :, bad.blocks[3] * 4] = float("nan")
    found = given.attend(backend)
    for span in given.spans:
        rows = slice(span.row, span.row + span.length)
        if span is bad:
            assert found[0, rows].isnan().all()
        else:
            assert torch.equal(found[0, rows], clean[0, rows])


@pytest.mark.parametrize("scaling", [0.01, 3.0, 60.0])
def test_the_exponential_is_right_far_out(scaling: float) -> None:
    """Law: scores that are nearly equal or hundreds apart match double precision."""
    given = case(torch.float32, segments=[(100, 1, False)])
    found = given.attend(CompiledBackend(), scaling=scaling)[0, 0]
    span, (keys, values) = given.spans[0], given.plane.stacks[0]
    slots = [span.blocks[i // 4] * 4 + i % 4 for i in range(101)]
    for head in range(4):
        key, value = (tensor[0, head // 2, slots].double() for tensor in (keys, values))
        weights = (key @ given.rows[0][0, head, 0].double() * scaling).softmax(0)
        torch.testing.assert_close(found[head].double(), weights @ value, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    "variation",
    [{"window": 5}, {"softcap": 2.0}, {"sinks": torch.tensor([0.3, -1.0, 2.0, 0.0])}],
    ids=["window", "softcap", "sinks"],
)
def test_unsupported_batches_take_sdpa(variation: dict[str, Any]) -> None:
    given = case(torch.float32)
    expected = given.attend(SdpaBackend(CPU), **variation)
    assert torch.equal(given.attend(CompiledBackend(), **variation), expected)


def test_a_tree_too_large_for_a_mask_goes_through_sdpa() -> None:
    given = case(torch.float32, segments=[(9, 80, False)])
    (span,) = given.spans
    wide = [Span(0, 80, 9, span.blocks, ancestors_of([-1] * 79))]
    assert torch.equal(given.attend(CompiledBackend(), wide), given.attend(SdpaBackend(CPU), wide))


def test_float32_rows_stay_float32() -> None:
    """Law: float32 rows over a bfloat16 plane are rounded once, and the output is float32."""
    given = case(torch.bfloat16)
    rounded = [given.attend(backend) for backend in (SdpaBackend(CPU), CompiledBackend())]
    given.rows = [part.float() for part in given.rows]
    for backend, expected in zip((SdpaBackend(CPU), CompiledBackend()), rounded, strict=True):
        found = given.attend(backend)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.bfloat16(), expected, rtol=1e-2, atol=1e-2)


def test_it_is_chosen_by_device_threads_and_layers() -> None:
    def chosen(dtype: torch.dtype = torch.float32, **shape: Any) -> str:
        layer = LayerShape(**{"layer": 0, "kv_heads": 2, "key_dim": 32, "value_dim": 32, **shape})
        return choose_attention("auto", CPU, dtype=dtype, layers=[layer])

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert chosen() == chosen(torch.bfloat16) == "compiled"
        assert chosen(window=5) == chosen(value_dim=16) == "sdpa"
        assert chosen(torch.float16) == "sdpa"
        assert chosen(torch.bfloat16, key_dim=16, value_dim=16) == "sdpa"
        torch.set_num_threads(MOST_THREADS + 1)
        assert chosen() == "sdpa"
    finally:
        torch.set_num_threads(before)
    with pytest.raises(ConfigError, match="the device is cuda"):
        choose_attention("compiled", torch.device("cuda"), dtype=torch.float32, layers=[])


@pytest.mark.parametrize(
    ("dtype", "heads"), [(torch.float16, 32), (torch.float32, 24), (torch.bfloat16, 16)]
)
def test_unsupported_settings_are_refused_by_name(dtype: torch.dtype, heads: int) -> None:
    """Bug: `attention = "compiled"` with an unsupported dtype or head size silently ran SDPA and
    was reported as compiled."""
    layers = [LayerShape(0, 2, heads, heads)]
    known = rf"multiples of {LANES} \(float32\) or {2 * LANES} \(bfloat16\)"
    message = f"{known}; .* heads of {heads} in {str(dtype).removeprefix('torch.')}; use 'auto'"
    with pytest.raises(ConfigError, match=message):
        choose_attention("compiled", CPU, dtype=dtype, layers=layers)
