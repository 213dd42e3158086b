"""Is each variant of the CPU code worth its lines? `python -m tests.model.cpu.variants`.

Times each variant and the next simpler one in turns, in one process and one thread, over the cells
in which both apply. Other memory is read between turns, like a draft's weights between two forwards
of its target. A cell's ratio is the simpler one's median time over the variant's: above 1, the
variant is faster. A variant stays if the geometric mean of its cells is at least `EARNS` (1.15).
Code for AVX512_BF16 and AMX is timed only on processors that have them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import geometric_mean, median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch

from engine import demo
from engine.arguments import Parser, whole
from engine.attention.interface import NAME, LayerShape, Span, Variation, register
from engine.attention.sdpa import SdpaBackend
from engine.cpu import kernels_products, kernels_tiles, weights
from engine.cpu.attention import CompiledBackend
from engine.cpu.decoder import CompiledDecoder
from engine.cpu.draws import QuickDraws
from engine.cpu.fused import FusedDecoder
from engine.cpu.jit import HAS_TILES
from engine.cpu.vectors import MULTIPLIES_PAIRS, PANEL
from engine.demo.tokens import VOCABULARY
from engine.lab.synthetic import random_target, sized
from engine.messages import SamplingParams
from engine.model.kv_cache import KVCache
from engine.model.llama import read_llama
from engine.model.loaded import ModuleCall
from engine.sampling.device_draws import DeviceDraws
from engine.sampling.logits import LogitsProcessor, RowContext
from engine.sampling.plain import Rows
from engine.scheduling.segment import Segment
from engine.scheduling.sequence import Sequence as Request

EARNS = 1.15
ROWS = (1, 4, 8, 16)
CONTEXT = 256  # tokens before the rows
BLOCK = 16  # tokens
SWEPT = 1 << 26  # bytes read between turns
WIDTH = 4096  # of the matrix in the timed products, larger than a cache

Run = Callable[[], object]


class Pair(NamedTuple):
    """A variant and the next simpler one, in one cell."""

    variant: str
    cell: str
    run: Run
    simpler: Run


def models() -> Iterator[tuple[str, Any]]:
    """Yield names and models, in float32 and exact in bfloat16."""
    for role in ("draft", "target"):
        built_in = read_llama(Path(demo.__file__).parent / role)
        assert built_in is not None
        yield role, built_in.float()
    register()
    random = random_target(sized(27e6), 0)
    random.set_attn_implementation(NAME)
    yield "27 M", random


def forwards(name: str, model: Any) -> Iterator[Pair]:
    """Yield the variants of a float32 forward, and of the attention of all layers."""
    config = model.config
    dim, heads, kv_heads = config.head_dim, config.num_attention_heads, config.num_key_value_heads
    layers = [LayerShape(i, kv_heads, dim, dim) for i in range(config.num_hidden_layers)]
    each = -(-(CONTEXT + max(ROWS)) // BLOCK)
    blocks = list(range(each))
    plane = KVCache(max(ROWS) * each, BLOCK, "cpu").add_plane(name, layers, torch.float32)
    sdpa, compiled = SdpaBackend(torch.device("cpu")), CompiledBackend()
    loop, fused = ModuleCall(model), FusedDecoder(model)
    packed, decoder = FusedDecoder(model, packed=True), CompiledDecoder(model, positions=512)

    def call(way: Any, rows: int) -> Run:
        ids = torch.arange(rows)[None]
        spans = [Span(0, rows, CONTEXT, blocks)]
        return lambda: way(ids, CONTEXT + ids, rows, sdpa.prepare(plane, spans))

    def attend(backend: Any, sequences: int, rows: int) -> Run:
        shape = sequences * rows, dim
        query, key = torch.randn(1, heads, *shape), torch.randn(1, kv_heads, *shape)
        tables = [list(range(i * each, (i + 1) * each)) for i in range(sequences)]
        spans = [Span(i * rows, rows, CONTEXT, table) for i, table in enumerate(tables)]

        def run() -> None:
            prepared = backend.prepare(plane, spans)
            for layer in range(len(layers)):
                prepared.run(layer, query, key, key, Variation())

        return run

    for rows in ROWS:
        cell, once = f"{name}, {rows} rows", call(fused, rows)
        segments = [Segment(list(range(rows)), CONTEXT, blocks, rows)]
        yield Pair("fused decoder", cell, once, call(loop, rows))
        yield Pair("packed weights", cell, call(packed, rows), once)
        yield Pair("compiled decoder", cell, partial(decoder, segments, plane), once)
        for shape in ((1, rows), (rows, 1))[: 1 + (rows > 1)]:
            cell = f"{name}, {shape[0]} sequences, {shape[1]} rows"
            yield Pair("compiled attention", cell, attend(compiled, *shape), attend(sdpa, *shape))


def draws(vocab: int) -> Iterator[Pair]:
    """Yield compiled draws against torch's: at temperature 0 and 1, and with top_p."""
    processor = LogitsProcessor([0])
    quick = QuickDraws(processor, vocab)
    exact = DeviceDraws(processor, vocab, torch.device("cpu"))
    for temperature, top_p in ((0.0, 1.0), (1.0, 1.0), (1.0, 0.9)):
        params = SamplingParams(seed=1, max_tokens=99, temperature=temperature, top_p=top_p)
        seq = Request("a", params, [0, 1], 2)
        for rows in ROWS:
            logits = torch.randn(rows, vocab) * 3
            contexts = [RowContext(seq, [0] * depth) for depth in range(rows)]
            batch = [Rows(seq, 0, rows, seq.num_tokens)]

            slow = partial(exact.draw_adjusted, logits, contexts)
            cell = f"{vocab} ids, {rows} rows, T={temperature:g}, top_p={top_p:g}"
            yield Pair("compiled draws", cell, partial(quick.draw, logits.numpy(), batch), slow)


def products() -> Iterator[Pair]:
    """Yield products with one matrix: in int8, and in bfloat16 where the processor has it."""
    weight = (torch.randn(WIDTH, WIDTH) * 0.02).bfloat16()
    words, int8 = weights.pack(weight), weights.pack_int8(weight)
    for rows in ROWS:
        x, y = np.random.rand(rows, WIDTH).astype(np.float32), np.empty((rows, WIDTH), np.float32)
        pairs, cell = kernels_products.as_words(x), f"{WIDTH} by {WIDTH}, {rows} rows"
        by_vectors, chosen, half = kernels_products.by_vectors, kernels_products.product, WIDTH // 2
        in_float32, space = partial(by_vectors, x, half, words, y), kernels_tiles.room(half, PANEL)
        yield Pair(
            "int8", cell, partial(chosen, x, int8, True, y), partial(chosen, x, words, True, y)
        )
        by_tiles = partial(kernels_tiles.product_of_tiles, pairs, words, y)
        if MULTIPLIES_PAIRS:
            yield Pair("by pairs", cell, partial(by_vectors, pairs, half, words, y), in_float32)
        if HAS_TILES:
            yield Pair("AMX tiles", cell, by_tiles, in_float32)
            for bits, form in ((12, weights.pack_twelve), (8, weights.pack_eight)):
                by_codes = partial(kernels_tiles.product_of_codes, pairs, form(weight), space, y)
                yield Pair(f"{bits} bits with AMX", cell, by_codes, by_tiles)


def medians(pair: Pair, turns: int) -> tuple[float, float]:
    """Return the median seconds of the variant and of the simpler one."""
    swept = np.ones(SWEPT, np.uint8)
    found = []
    for _ in range(turns + 2):  # two are warm-ups
        for run in (pair.run, pair.simpler):
            swept.max()
            begin = perf_counter()
            run()
            found.append(perf_counter() - begin)
    return median(found[4::2]), median(found[5::2])


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> None:
    parser = Parser("python -m tests.model.cpu.variants", __doc__)
    parser.add_argument("--turns", type=whole(1, 1000), default=15, help="of each cell (15)")
    turns = parser.parse_args(arguments).turns
    torch.set_num_threads(1)
    ratios: dict[str, list[float]] = {}
    print(f"{'variant':20} {'cell':40} {'ms':>8} {'simpler':>8} {'ratio':>6}")
    cells = [products(), draws(VOCABULARY), *(forwards(*named) for named in models())]
    for pair in chain.from_iterable(cells):
        mine, simpler = medians(pair, turns)
        ratio = simpler / mine
        ratios.setdefault(pair.variant, []).append(ratio)
        print(
            f"{pair.variant:20} {pair.cell:40} {mine * 1e3:8.3f} {simpler * 1e3:8.3f} {ratio:6.2f}",
            flush=True,
        )
    print(f"\n{'variant':20} {'cells':>5} {'mean':>6}")
    for name, found in ratios.items():
        mean = geometric_mean(found)
        print(f"{name:20} {len(found):5} {mean:6.2f} {'stays' if mean >= EARNS else 'goes'}")


if __name__ == "__main__":
    main()
