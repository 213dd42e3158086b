"""Does each variant of the CPU's code earn its lines? `python -m engine.lab.cpu_variants`.

Each variant is timed against the next simpler one in turns, in one process and one thread, over the
cells in which both apply. Between two turns other weights are read, as a draft's are between two
forwards of its target. A cell's ratio is that of the medians, simpler by variant: above 1 the
variant is faster. A variant stays if the geometric mean of its cells is at least `EARNS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean, median
from time import perf_counter
from typing import Any

import numpy as np
import torch

from engine import demo
from engine.arguments import Parser, whole
from engine.attention.interface import LayerShape, Span
from engine.attention.sdpa import SdpaBackend
from engine.cpu.attention import CompiledBackend
from engine.cpu.decoder import CompiledDecoder
from engine.cpu.draws import QuickDraws
from engine.cpu.fused import FusedDecoder
from engine.cpu.jit import HAS_TILES
from engine.cpu.layers import exchange_layers
from engine.cpu.packed import PackedDecoder
from engine.cpu.vectors import SLOW_PAIRS, multiplies_pairs
from engine.messages import SamplingParams
from engine.model.call import front_door
from engine.model.kv_cache import KVCache, Plane
from engine.model.llama import GenerationConfig, Llama, LlamaConfig, read_llama
from engine.sampling.device_draws import DeviceDraws
from engine.sampling.logits import LogitsProcessor, RowContext
from engine.sampling.plain import Rows
from engine.scheduling.segment import Segment
from engine.scheduling.sequence import Sequence as Request

EARNS = 1.15
ROWS = (1, 4, 8, 16)
CONTEXT = 256  # tokens before the rows
BLOCK = 16  # tokens
SWEPT = 1 << 26  # bytes read between two turns

Run = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Pair:
    """A variant and the next simpler one, in one cell."""

    variant: str
    cell: str
    run: Run
    simpler: Run


class Shape:
    """A model with one sequence's keys and values. float32, and exact in bfloat16."""

    def __init__(self, name: str, model: Llama) -> None:
        self.name, self.model, config = name, model, model.config
        self.layers = [
            LayerShape(i, config.num_key_value_heads, config.head_dim, config.head_dim)
            for i in range(config.num_hidden_layers)
        ]
        self.blocks = list(range(-(-(CONTEXT + max(ROWS)) // BLOCK)))
        cache = KVCache(len(self.blocks), BLOCK, "cpu")
        self.plane: Plane = cache.add_plane(name, self.layers, torch.float32)

    def call(self, decoder: Any, rows: int, backend: Any) -> Run:
        """A forward of `rows` rows after the context, through torch."""
        ids = torch.arange(rows)[None]
        positions = CONTEXT + ids
        spans = [Span(0, rows, CONTEXT, self.blocks)]
        return lambda: decoder(ids, positions, rows, backend.prepare(self.plane, spans))

    def attend(self, backend: Any, rows: int) -> Run:
        """One layer's attention."""
        config, layer = self.model.config, self.layers[0]
        query = torch.randn(1, config.num_attention_heads, rows, layer.key_dim)
        key = torch.randn(1, layer.kv_heads, rows, layer.key_dim)
        spans, plain = (
            [Span(0, rows, CONTEXT, self.blocks)],
            dict.fromkeys(("scaling", "window", "softcap", "sinks")),
        )
        return lambda: backend.prepare(self.plane, spans).attend(0, query, key, key, **plain)

    def compiled(self, decoder: CompiledDecoder, rows: int) -> Run:
        segments = [Segment(list(range(rows)), CONTEXT, self.blocks, rows)]
        return lambda: decoder(segments, self.plane)


def built_in(role: str) -> Shape:
    model = read_llama(Path(demo.__file__).parent / role)
    assert model is not None
    return Shape(f"built-in {role}", model.float())


def larger() -> Shape:
    config = LlamaConfig(
        model_type="llama", architectures=("LlamaForCausalLM",), vocab_size=8192, hidden_size=512,
        intermediate_size=1536, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=4,
        head_dim=64, max_position_embeddings=2048, rms_norm_eps=1e-5, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4}, dtype="float32",
        eos_token_id=None, hidden_act="silu", attention_bias=False, mlp_bias=False,
    )  # fmt: skip
    model = Llama(config, GenerationConfig())
    torch.manual_seed(0)
    state = {
        name: torch.ones(p.shape) if p.dim() == 1 else (torch.randn(p.shape) * 0.05).bfloat16()
        for name, p in model.named_parameters()
    }
    model.load_state_dict({n: t.float() for n, t in state.items()}, assign=True)
    return Shape("27 M", model.requires_grad_(False))


def forwards(shape: Shape) -> Iterator[Pair]:
    """The ways of a float32 forward, each against the one before."""
    exchanged, whole = deepcopy(shape.model), SdpaBackend(torch.device("cpu"))
    exchange_layers(exchanged)
    loop, few = front_door(shape.model), FusedDecoder(deepcopy(exchanged), turned=False)
    turned = FusedDecoder(deepcopy(exchanged), turned=True)
    quick = front_door(exchanged)
    many = copy(few)
    many._few = None
    packed = PackedDecoder(shape.model, few)
    compiled = CompiledDecoder(shape.model, positions=CONTEXT + max(ROWS))
    small_pages = copy(compiled)
    small_pages._weights = tuple(_small_pages(part) for part in compiled._weights)
    backend = CompiledBackend()
    for rows in ROWS:
        cell = f"{shape.name}, {rows} rows"
        by_rows = [shape.call(d, rows, whole) for d in (loop, quick, many, few, turned, packed)]
        names = ("layers exchanged", "fused decoder", "few rows", "turned", "packed")
        before = (0, 1, 2, 3, 3)
        for i, (name, simpler) in enumerate(zip(names, before, strict=True), 1):
            if name not in ("few rows", "turned") or rows <= 7:
                yield Pair(name, cell, by_rows[i], by_rows[simpler])
        run = shape.compiled(compiled, rows)
        yield Pair("compiled decoder", cell, run, by_rows[3])
        yield Pair("weights in huge pages", cell, run, shape.compiled(small_pages, rows))
        yield Pair(
            "compiled attention", cell, shape.attend(backend, rows), shape.attend(whole, rows)
        )


def _small_pages(part: Any) -> Any:
    """A copy where torch puts it, which asks for no huge pages."""
    held = torch.empty(part.nbytes, dtype=torch.uint8).numpy()
    found = held.view(part.dtype).reshape(part.shape)
    found[:] = part
    return found


def draws(vocab: int) -> Iterator[Pair]:
    """Compiled against torch's, at T=0 and 1, and with top_p."""
    processor = LogitsProcessor([0])
    quick = QuickDraws(processor, vocab)
    exact = DeviceDraws(processor, vocab, torch.device("cpu"))
    fields: list[dict[str, Any]] = [
        {"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9},
    ]  # fmt: skip
    for asked in fields:
        seq = Request("a", SamplingParams(seed=1, max_tokens=99, **asked), [0, 1], 2)
        for rows in ROWS:
            logits = torch.randn(rows, vocab) * 3
            contexts = [RowContext(seq, [0] * depth) for depth in range(rows)]

            def slow(logits: Any = logits, contexts: Any = contexts) -> object:
                return exact.draw_adjusted(logits, contexts)

            table, which = logits.numpy(), [Rows(seq, 0, rows, seq.num_tokens)]

            def fast(table: Any = table, which: Any = which) -> object:
                return quick.draw(table, which)

            yield Pair("compiled draws", f"{vocab} ids, {rows} rows, {asked}", fast, slow)


def ratio(pair: Pair, turns: int) -> tuple[float, float]:
    """Medians in seconds: of the variant, and of the simpler one."""
    swept = np.ones(SWEPT, np.uint8)
    found: tuple[list[float], list[float]] = ([], [])
    for turn in range(turns + 2):
        for run, times in zip((pair.run, pair.simpler), found, strict=True):
            swept.max()
            begin = perf_counter()
            run()
            if turn >= 2:
                times.append(perf_counter() - begin)
    return median(found[0]), median(found[1])


def not_here() -> Sequence[tuple[str, str]]:
    """Variants that this processor cannot run, and why."""
    found = []
    if not multiplies_pairs():
        found.append(("bfloat16 by pairs, several panels at once", "no AVX512_BF16"))
    if not (multiplies_pairs() and SLOW_PAIRS):
        found.append(("pairs taken apart", "no Intel processor with AVX512_BF16"))
    if not HAS_TILES:
        found.append(("tiles, their attention, eight and twelve bits", "no AMX"))
    return found


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> None:
    parser = Parser("python -m engine.lab.cpu_variants", __doc__)
    parser.add_argument("--turns", type=whole(1, 1000), default=15, help="of each cell (15)")
    turns = parser.parse_args(arguments).turns
    torch.set_num_threads(1)
    ratios: dict[str, list[float]] = {}
    print(f"{'variant':24} {'cell':52} {'ms':>8} {'simpler':>8} {'ratio':>6}")
    for shape in (built_in("draft"), built_in("target"), larger()):
        for pair in (*forwards(shape), *draws(shape.model.config.vocab_size)):
            mine, simpler = ratio(pair, turns)
            ratios.setdefault(pair.variant, []).append(simpler / mine)
            print(
                f"{pair.variant:24} {pair.cell:52} {mine * 1e3:8.3f} {simpler * 1e3:8.3f} "
                f"{simpler / mine:6.2f}", flush=True,
            )  # fmt: skip
    print(f"\n{'variant':50} {'cells':>5} {'mean':>6}")
    for name, found in ratios.items():
        mean = geometric_mean(found)
        print(f"{name:50} {len(found):5} {mean:6.2f} {'stays' if mean >= EARNS else 'goes'}")
    for name, reason in not_here():
        print(f"{name:50} does not apply here: {reason}")


if __name__ == "__main__":
    main()
