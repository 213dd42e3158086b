"""The card: an Outcome for people. Bytes are decimal (GB), as on data sheets."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from engine.lab.plan.device import Device
from engine.lab.plan.outcome import ACCEPTANCES, ASSUMPTIONS, Block, Cell, Outcome, Settings
from engine.lab.plan.shape import ModelShape

SHOWN_KS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)

LEGEND = (
    "c: a draft step; round, verify: a round with K guesses and its target pass; all in steps of",
    "K = 0. break-even: the least acceptance at which K pays. a=...: speed-up at that acceptance.",
)


def card(outcome: Outcome) -> str:
    """Text of one screen for each precision."""
    settings = outcome.settings
    draft = f"with {settings.draft.name}" if settings.draft else "with free guesses"
    lines = [f"{settings.target.name} {draft} on {device_line(settings.device)}"]
    lines += [model_line(shape) for shape in (settings.target, settings.draft) if shape]
    lines += [f"note: {note}" for note in (*outcome.notes, *options_line(settings))]
    for block in outcome.blocks:
        lines += ["", *_block_lines(settings, block)]
    lines += ["", *LEGEND, "On paper:", *(f"- {line}" for line in ASSUMPTIONS)]
    return "\n".join(lines)


def options_line(settings: Settings) -> Iterator[str]:
    """What differs from the defaults and changes every figure."""
    if settings.kv != "bf16":
        yield f"KV cache in {settings.kv}"
    if settings.draft and settings.draft_precision:
        yield f"draft weights in {settings.draft_precision}"
    if settings.launch:
        yield f"{duration(settings.launch)} of overhead a layer"


def device_line(device: Device) -> str:
    """`4 x h100-sxm: 13400 GB/s, 3958 TFLOP/s (fp8 7916), 320 GB`."""
    fp8 = f" (fp8 {rate(device.fp8_flops)})" if device.fp8_flops else ""
    memory = f", {amount(device.memory)}" if device.memory is not None else ""
    return (
        f"{device.count} x {device.name}: {device.bandwidth / 1e9:.0f} GB/s, "
        f"{rate(device.bf16_flops)} TFLOP/s{fp8}{memory}"
    )


def rate(flops: float) -> str:
    """TFLOP/s: `2.5`, `989`."""
    tera = flops / 1e12
    return f"{tera:.0f}" if tera >= 100 else f"{tera:.3g}"


def model_line(shape: ModelShape) -> str:
    experts = ""
    if shape.experts is not None:
        experts = (
            f", {weights(shape.active_parameters)} of them for a token "
            f"({shape.experts.per_token} of {shape.experts.count} experts)"
        )
    return (
        f"{shape.name}: {weights(shape.parameters)} weights{experts}, {shape.layers} layers, "
        f"{shape.kv_values_per_token} numbers of KV a token"
    )


def weights(count: int) -> str:
    """`70.55 G`, `8.45 M`."""
    return f"{count / 1e9:.2f} G" if count >= 1e8 else f"{count / 1e6:.2f} M"


def amount(count: float) -> str:
    """Bytes with three digits: `141 GB`, `2.47 GB`, `30.7 kB`."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def duration(seconds: float) -> str:
    """`10.6 ms`, `185 us`."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def _block_lines(settings: Settings, block: Block) -> Iterator[str]:
    beside = f" + {amount(block.draft_bytes)}" if settings.draft else ""
    yield (
        f"{block.precision}: weights {amount(block.target_bytes)}{beside}"
        f"{_room(block, settings.device)}"
    )
    if block.kv_tokens == 0:
        return
    batch, context = settings.batches[0], settings.contexts[0]
    yield (
        f"a step at batch {batch}, context {context}: target {duration(block.target_seconds)}, "
        f"draft {duration(block.draft_seconds)}, c = {block.draft_cost:.3f}; "
        f"K = 0 gives {block.cells[0].plain_tokens_per_second:.4g} tokens/s"
    )
    speeds = " ".join(f"a={acceptance:.1f}".rjust(6) for acceptance in ACCEPTANCES)
    yield f"   K  round  verify  break-even  {speeds}"
    for row in block.rounds:
        if row.k in SHOWN_KS:
            least = "never" if row.break_even is None else f"{row.break_even:.3f}"
            speeds = " ".join(f"{speed:5.2f}x" for speed in row.speed_ups)
            yield f"{row.k:4}{row.round_cost:7.2f}{row.verify_cost:8.2f}{least:>12}  {speeds}"
    yield f"best K and speed-up at acceptance {settings.acceptance:g}, by batch and context"
    yield from grid(block.cells, settings.contexts)


def _room(block: Block, device: Device) -> str:
    if block.kv_tokens is None or device.memory is None:
        return ""
    if block.kv_tokens == 0:
        least = math.ceil((block.target_bytes + block.draft_bytes) / device.memory * device.count)
        return f"; they do not fit {amount(device.memory)}: --devices {least} or more"
    return f"; beside them the memory holds the KV of {block.kv_tokens} tokens"


def grid(cells: Sequence[Cell], contexts: Sequence[int]) -> Iterator[str]:
    """A row for each batch. Cells say so where the KV does not fit the memory, or where the
    context is longer than a model's positions."""
    yield " batch" + "".join(_short(context).rjust(13) for context in contexts)
    for start in range(0, len(cells), len(contexts)):
        row = cells[start : start + len(contexts)]
        yield f"{row[0].batch:6}" + "".join(_cell(cell).rjust(13) for cell in row)


def _cell(cell: Cell) -> str:
    if not cell.within_positions:
        return "too long"
    if cell.fits is False:
        return "KV too large"
    return f"{cell.best_k} {cell.speed_up:5.2f}x"


def _short(context: int) -> str:
    return f"{context // 1024}k" if context % 1024 == 0 else str(context)
