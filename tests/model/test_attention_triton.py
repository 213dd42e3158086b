"""Our Triton kernel against the reference backend in Triton's interpreter (float32 only: its
bfloat16 products are wrong), and compiled for an H100 without one."""

from __future__ import annotations

import math
import re
import subprocess
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.attention.interface import FP8, LayerShape, Span, Variation, padding_span
from engine.attention.packed_copy import PackedCopy
from engine.attention.sdpa import SdpaBackend
from engine.attention.spans import visible
from engine.errors import ConfigError
from engine.model.attention_choice import attention_backend, choose_attention
from engine.model.kv_cache import Plane
from engine.model.memory import SPLITS
from engine.scheduling.segment import ancestors_of

triton = pytest.importorskip("triton", "3.7", reason="needs triton 3.7 or later")

from engine.attention import triton_kernels as kernels  # noqa: E402
from engine.attention.triton import (  # noqa: E402
    DECODES,
    MOST_NODES,
    PROMPTS,
    HostTables,
    TritonBackend,
)
from engine.attention.triton_kernels import Splitting  # noqa: E402

CPU = torch.device("cpu")
BLOCKS = 24
TREE = ancestors_of([-1, 0, 0, 1, -1, 4])
BROAD = ancestors_of([-1, *(i // 3 for i in range(39))])

# A decode, a verification of K = 4, trees with and without committed rows before, a shared prefix.
SPANS = [
    Span(0, 1, 75, [5, 4, 9, 2, 11]),
    Span(1, 5, 45, [6, 7, 8, 10]),
    Span(6, 6, 33, [12, 20, 13], TREE),
    Span(12, 8, 9, [16, 17], TREE),
    Span(20, 1, 40, [6, 7, 19]),
]


class Setting(NamedTuple):
    page: int = 16
    heads: tuple[int, int] = (2, 1)
    dims: tuple[int, int] = (16, 16)
    splitting: Splitting = Splitting(4, 32)
    kept: torch.dtype = torch.float32
    prompts: Splitting = PROMPTS


BY_PATH = Setting(splitting=Splitting(4, 16), prompts=Splitting(4, 16))  # batch-invariant


def plane(setting: Setting) -> Plane:
    shape = LayerShape(0, setting.heads[1], *setting.dims)
    made = Plane([shape], BLOCKS, block_size=setting.page, dtype=setting.kept, device=CPU)
    generator = torch.Generator().manual_seed(0)
    for tensor in made.stacks[0]:
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return made


def rows(setting: Setting, count: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    (heads, kv_heads), (key_dim, value_dim) = setting.heads, setting.dims
    shapes = ((heads, key_dim), (kv_heads, key_dim), (kv_heads, value_dim))
    query, key, value = (
        torch.randn(1, count, number, dim, generator=generator).transpose(1, 2)
        for number, dim in shapes
    )
    return query, key, value


def attend(prepared: Any, setting: Setting, spans: list[Span], how: Variation) -> Tensor:
    found: Tensor = prepared.run(0, *rows(setting, sum(s.length for s in spans)), how)
    return found


def backend(setting: Setting = Setting()) -> TritonBackend:  # noqa: B008
    return TritonBackend(CPU, setting.splitting, setting.prompts)


def compare(setting: Setting, spans: list[Span], how: Variation) -> None:
    ours, theirs = plane(setting), plane(setting)
    found = attend(backend(setting).prepare(ours, spans), setting, spans, how)
    expected = attend(SdpaBackend(CPU).prepare(theirs, spans), setting, spans, how)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for one, other in zip(ours.stacks[0], theirs.stacks[0], strict=True):
        assert torch.equal(one.float(), other.float())


Run = Callable[..., Any]


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Run]:
    """Yield a function that runs a function of this file in a process with interpreted kernels: the
    interpreter must be chosen before the kernels are imported."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            pool.submit(int).result()
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


SINKS = torch.tensor([0.3, 2.0])
VARIATIONS = {
    "plain": Variation(),
    "window": Variation(window=6),
    "softcap": Variation(softcap=2.0),
    "sinks": Variation(sinks=SINKS),
    "all": Variation(0.7, 37, 2.0, SINKS),
}


@pytest.mark.parametrize("how", VARIATIONS.values(), ids=VARIATIONS)
def test_equals_the_reference(how: Variation, interpreted: Run) -> None:
    """Law: decodes, verifications, trees and shared pages give the output of SDPA with every
    variation that a family needs, and the same keys land in the same slots."""
    interpreted(compare, Setting(), SPANS, how)


SETTINGS = {
    "pages of 32": Setting(page=32),
    "one split": Setting(splitting=Splitting(1, 32)),
    "pages of 6, chunks of one block": Setting(page=6, splitting=Splitting(2, 16)),
    "two heads of keys": Setting(heads=(4, 2)),
    "a head each": Setting(heads=(2, 2)),
    "five heads on one, two at a time": Setting(heads=(5, 1)),
    "dims that are no powers of two": Setting(dims=(40, 24)),
    "kept in eight bits": Setting(kept=FP8),
}


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_shapes(setting: Setting, interpreted: Run) -> None:
    """Law: page size, number of splits and heads do not change the result."""
    heads = setting.heads[0]
    spans = [Span(0, 1, 24, [5, 4, 9, 2, 11]), Span(1, 5, 18, [6, 7, 8, 10])]
    interpreted(compare, setting, spans, Variation(window=21, sinks=torch.linspace(-1, 1, heads)))


@pytest.mark.parametrize("window", [2, 9])
@pytest.mark.parametrize("setting", [Setting(), BY_PATH], ids=["by bits", "by path"])
def test_a_tree_of_more_rows_than_a_tile(setting: Setting, window: int, interpreted: Run) -> None:
    """Law: all pieces of a tree see its first nodes, through bits in both halves of a mask, or by
    the paths of its nodes; a node's position is its depth."""
    spans = [Span(0, 43, 20, [3, 1, 8, 9], BROAD)]
    assert len(HostTables(spans, 16).pieces) == 1 + 40 // Splitting().rows
    interpreted(compare, setting, spans, Variation(window=window))


LONG = [
    Span(0, 65, 0, [1, 2, 3, 4, 5]),
    Span(65, 2, 17, [6, 7]),
    Span(67, 70, 3, [8, 9, 10, 11, 12], TREE),
    Span(137, 90, 20, [13, 14, 15, 16, 17, 18, 19]),
]


@pytest.mark.parametrize("how", [Variation(), Variation(window=40)], ids=["plain", "window"])
def test_a_prompt_is_many_pieces(how: Variation, interpreted: Run) -> None:
    """Law: prompts of any length, anywhere among short spans, and with a tree at the end."""
    interpreted(compare, Setting(), LONG, how)


@pytest.mark.parametrize("how", [Variation(), Variation(window=40)], ids=["plain", "window"])
def test_long_spans_have_a_splitting_of_their_own(how: Variation, interpreted: Run) -> None:
    """Law: with 256 rows of a prompt, all spans of the forward still get the output of SDPA."""
    spans = [Span(0, 260, 3, range(17)), Span(260, 2, 17, [20, 21])]
    spans.append(Span(262, 20, 30, [17, 18, 19, 22], TREE))
    for prompts in (PROMPTS, Splitting(2, 32, 4)):
        interpreted(compare, Setting(prompts=prompts), spans, how)


def test_batch_invariant_rows_have_one_splitting() -> None:
    """Law: else a row's bits would depend on whether its forward contains a long span."""
    invariant: Any = attention_backend("triton", CPU, batch_invariant=True)
    usual: Any = attention_backend("triton", CPU)
    assert invariant.prompts == invariant.splitting == usual.splitting
    assert usual.prompts == PROMPTS


def check_staged(count: int, cases: list[list[Span]]) -> None:
    setting, sent = Setting(), PackedCopy(CPU)
    ours, theirs = plane(setting), plane(setting)
    staged = backend(setting).stage(ours, count, sent)
    sent.build()
    graph = staged.step(0)
    for spans in cases:
        used = sum(span.length for span in spans)
        padded = (
            [*spans, padding_span(used, count - used, BLOCKS - 1, 16)] if used < count else spans
        )
        assert staged.suits(padded)
        staged.fill(padded)
        sent.send()
        found = attend(graph, setting, padded, Variation())
        expected = attend(SdpaBackend(CPU).prepare(theirs, padded), setting, padded, Variation())
        torch.testing.assert_close(found[:, :used], expected[:, :used], rtol=1e-4, atol=1e-5)
        assert found.isfinite().all()
        for one, other in zip(ours.stacks[0], theirs.stacks[0], strict=True):
            assert torch.equal(one[:, :, :-16], other[:, :, :-16])  # all but the padding block


def test_staged_attention_is_filled_anew(interpreted: Run) -> None:
    """Law: an attention staged once serves any later spans with as many rows, trees and prompts
    included, from the same tensors; padding rows write to the padding block only."""
    few = [
        [Span(0, 1, 75, [5, 4, 9, 2, 11]), Span(1, 5, 45, [6, 7, 8, 10])],
        [Span(0, 6, 33, [12, 20, 13], TREE)],
        [Span(i, 1, i, [i]) for i in range(9)],
    ]
    interpreted(check_staged, 9, few)
    interpreted(check_staged, 88, [[Span(0, 70, 8, [5, 4, 9, 2, 11]), Span(70, 1, 20, [6, 7])]])


def check_steps() -> None:
    setting, steps, sent = Setting(page=6), 8, PackedCopy(CPU)
    how = Variation(window=9)
    ours, theirs = plane(setting), plane(setting)
    staged = backend(setting).stage(ours, 4, sent, steps)
    sent.build()
    spans = [Span(0, 1, 33, [5, 4, 9, 2, 11, 1, 0]), Span(1, 1, 3, [6, 7])]
    spans += [Span(row, 1, 0, [BLOCKS - 1] * 2) for row in (2, 3)]
    staged.fill(spans)
    sent.send()
    for step in range(steps):
        now = [span._replace(start=span.start + step) for span in spans]
        found = attend(staged.step(step), setting, now, how)
        expected = attend(SdpaBackend(CPU).prepare(theirs, now), setting, now, how)
        torch.testing.assert_close(found[:, :2], expected[:, :2], rtol=1e-4, atol=1e-5)
        assert found.isfinite().all()


def test_one_fill_serves_all_steps(interpreted: Run) -> None:
    """Law: filled once, it serves all steps of a chain, each one position further, across pages and
    with a window; padding stays in the padding block."""
    interpreted(check_steps)


def test_a_graph_bounds_the_pages() -> None:
    """Law: more pages than the graph has room for are refused; a prompt as such is not."""
    rows, made = 128, plane(Setting())
    staged = backend().stage(made, rows, PackedCopy(CPU))
    assert staged.suits([Span(0, rows, 0, list(range(8)))])
    assert not staged.suits([Span(i, 1, 16 * 20 - 1, list(range(20))) for i in range(rows)])


def test_a_tree_has_no_more_nodes_than_a_mask_has_bits() -> None:
    most = ancestors_of([-1] * MOST_NODES)
    assert len(HostTables([Span(0, MOST_NODES, 0, range(9), most)], 16).rows) == MOST_NODES
    with pytest.raises(AssertionError):
        HostTables([Span(0, MOST_NODES + 1, 0, range(9), [*most, ()])], 16)


def check_poison() -> None:
    setting = Setting()
    made = plane(setting)
    spans = [Span(0, 1, 20, [3, 4]), Span(1, 5, 30, [6, 5, 7])]
    held = {block * 16 + i for block in (3, 6, 5) for i in range(16)} | {64 + i for i in range(4)}
    others = [slot for slot in range(BLOCKS * 16) if slot not in held]
    for tensor in made.stacks[0]:
        tensor[:, :, others] = math.nan
    assert (
        attend(backend(setting).prepare(made, spans), setting, spans, Variation()).isfinite().all()
    )


def test_the_plan_knows_the_splits() -> None:
    """Law: the memory plan reserves room for the partial sums of the actual number of splits."""
    assert Splitting().splits == SPLITS


def test_a_poisoned_neighbour_does_no_harm(interpreted: Run) -> None:
    """Bug: 0 x NaN is NaN, so a visible row must not read what a page holds after the span."""
    interpreted(check_poison)


def check_bits() -> None:
    setting, start = Setting(splitting=Splitting(4, 16)), 96
    inputs, blocks = rows(setting, 7), [8, 9, 3, 2, 4, 5, 10]

    def run(spans: list[Span], chosen: list[int]) -> Tensor:
        made = plane(setting)
        for tensor, given in zip(made.stacks[0], inputs[1:], strict=True):  # its earlier rows
            tensor[0, :, 160 : 160 + 5] = given[0, :, :5]
        prepared = backend(setting).prepare(made, spans)
        query, key, value = (tensor[:, :, chosen] for tensor in inputs)
        # All rows but the first see one chunk less.
        return prepared.run(0, query, key, value, Variation(window=66))

    verified = run([Span(0, 5, start, blocks)], [0, 1, 2, 3, 4])
    among = run([Span(0, 2, 16, [11, 12]), Span(2, 5, start, blocks)], [5, 6, 0, 1, 2, 3, 4])
    assert torch.equal(verified, among[:, 2:])
    for i in range(5):
        assert torch.equal(run([Span(0, 1, start + i, blocks)], [i]), verified[:, i : i + 1])


def test_a_row_has_the_same_bits_in_any_batch(interpreted: Run) -> None:
    """Law: a row of a verification is bit-identical to the decode at its position, alone or among
    other spans."""
    interpreted(check_bits)


def check_tree_bits() -> None:
    # The first two nodes are in another chunk than the rest.
    setting, start, blocks, how = BY_PATH, 94, [8, 9, 3, 2, 4, 5, 10], Variation(window=66)
    sent, made = PackedCopy(CPU), plane(setting)
    query, key, value = rows(setting, 6)

    def run(prepared: Any, chosen: list[int]) -> Tensor:
        given = (tensor[:, :, chosen] for tensor in (query, key, value))
        found: Tensor = prepared.run(0, *given, how)
        return found

    staged = backend(setting).stage(made, 6, sent)
    sent.build()
    for ancestors in (TREE, None, TREE):  # another fill in between
        spans = [Span(0, 6, start, blocks, ancestors)]
        staged.fill(spans)
        sent.send()
        of_tree = run(staged.step(0), [*range(6)])
        assert torch.equal(run(backend(setting).prepare(made, spans), [*range(6)]), of_tree)
    for node, above in enumerate(TREE):
        for length in {1, len(above) + 1}:  # decoded, and verified in a chain
            path = [*above, node]
            spans = [Span(0, length, start + len(path) - length, blocks)]
            prepared = backend(setting).prepare(made, [Span(0, len(path), start, blocks)])
            run(prepared, path)  # the keys of its path
            found = run(backend(setting).prepare(made, spans), path[-length:])
            assert torch.equal(found[:, -1], of_tree[:, node])


def test_a_tree_node_has_the_bits_of_a_chain(interpreted: Run) -> None:
    """Bug: keys of a tree were read in the order of its nodes, so that with batch_invariant a row's
    bits depended on the tree around it. Law: they are those of a chain of its path."""
    interpreted(check_tree_bits)


def test_masks_say_what_is_visible() -> None:
    """Law: the visible keys are those before a piece's root and those of its mask bits."""
    spans = [*SPANS, Span(21, 43, 20, [3, 1, 8, 9], BROAD), Span(64, 20, 7, [3, 1])]
    listed = HostTables(spans, 16)
    seen: dict[int, list[bool]] = {}
    for first, count, end, root, origin, *_ in listed.pieces.tolist():
        for row in range(first, first + count):
            bits = int(listed.rows[row, 1:].view(np.uint64)[0])
            assert bits >> (end - root) == 0
            assert listed.rows[origin][0] == root
            seen[row] = [key < root or bool(bits >> key - root & 1) for key in range(end)]
    for span in spans:
        for row, expected in enumerate(visible(span, None).tolist(), span.row):
            assert seen[row] + [False] * (span.end - len(seen[row])) == expected


def test_the_choice_gives_the_reason() -> None:
    """Law: an unsupported device or head size is refused in one sentence."""

    def choose(device: str, dim: int) -> str:
        layers = [LayerShape(0, 2, dim, dim)]
        where = torch.device(device)
        return choose_attention("triton", where, dtype=torch.bfloat16, layers=layers)

    assert choose("cuda", 128) == "triton"
    with pytest.raises(ConfigError, match="'triton', but the device is cpu; use 'auto'"):
        choose("cpu", 128)
    with pytest.raises(ConfigError, match="heads of up to 256, and the model's are 512"):
        choose("cuda", 512)


@pytest.mark.parametrize(
    ("splitting", "by_path"),
    [(DECODES, False), (PROMPTS, False), (DECODES, True)],
    ids=["decode", "prompts", "by path"],
)
@pytest.mark.parametrize(
    ("dtype", "kept", "dims", "group"),
    [
        ("bf16", "bf16", (64, 64), 4),
        ("bf16", "bf16", (128, 128), 8),
        ("bf16", "bf16", (192, 128), 1),  # latent attention, as in DeepSeek V3
        ("fp16", "fp16", (256, 256), 4),
        ("fp32", "fp32", (64, 64), 2),
        ("bf16", "fp8e4nv", (128, 128), 8),
        ("fp16", "fp8e4nv", (256, 256), 4),
    ],
)
def test_compiles_for_an_h100(
    dtype: str, kept: str, dims: tuple[int, int], group: int, splitting: Splitting, by_path: bool,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Law: the kernels compile without a device, and no register spills to memory."""
    if by_path and dims[0] != dims[1]:
        pytest.skip("latent attention has no batch-invariant layers")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    how = Variation(window=100, softcap=30.0)
    size = 4 if dtype == "fp32" else 2
    fixed = kernels.constants(*dims, group, size, how, splitting.rows)
    fixed |= {"PAGE": 16, "CHUNK": 128, "SPLITS": splitting.splits, "BY_PATH": by_path}
    names = {"query": f"*{dtype}", "keys": f"*{kept}", "values": f"*{kept}"}
    options = {"num_stages": kernels.STAGES, "num_warps": kernels.warps_of(fixed["TILE"])}
    built = compiled(kernels.attend_splits, fixed, names, **options)
    (tmp_path / "kernel.cubin").write_bytes(built.asm["cubin"])
    program = Path(triton.__path__[0]) / "backends/nvidia/bin/cuobjdump"
    used = subprocess.run(
        [program, "-res-usage", tmp_path / "kernel.cubin"], capture_output=True, text=True
    )
    assert re.findall(r"STACK:(\d+)", used.stdout) == ["0"]
    assert built.metadata.shared <= 99 << 10  # shared memory per block on most GPUs
    left = {"VALUE_DIM": dims[1], "VALUE_WIDTH": fixed["VALUE_WIDTH"], "SPLITS": splitting.splits}
    left["SINKS"] = True
    compiled(kernels.combine_splits, left, {"output": f"*{dtype}", "sinks": f"*{dtype}"})


def compiled(kernel: Any, fixed: dict[str, Any], pointers: dict[str, str], **options: Any) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    known = {"sums": "*fp32", "tops": "*fp32", "scale": "fp32"}
    known |= dict.fromkeys(("rows", "pieces", "pages", "paths"), "*i32") | pointers
    known |= dict.fromkeys(fixed, "constexpr")
    types = {name: known.get(name, "i32") for name in kernel.arg_names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if types[name] not in ("fp32", "constexpr")
    }
    source = ASTSource(kernel, types, fixed, aligned)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own warnings
        return triton.compile(source, GPUTarget("cuda", 90, 32), options or {"num_warps": 4})
