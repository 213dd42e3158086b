"""The card and the plot, for people. Bytes are decimal (GB), as on data sheets."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from engine.lab.picture import picture
from engine.lab.plan.roofline import Device, Scenario, break_even
from engine.lab.plan.settings import ACCEPTANCES, Settings
from engine.lab.plan.shape import ModelShape

if TYPE_CHECKING:
    from engine.lab.picture import Axes

SHOWN_KS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)

LEGEND = """
c: a draft step; round, verify: a round with K guesses and its target pass; all in steps of
K = 0. break-even: the least acceptance at which K pays. a=...: speed-up at that acceptance.
On paper:
- a part of a pass (dense, experts, head, attention) takes max(bytes/bandwidth, FLOPs/peak)
- the parts of a pass add up, and nothing else takes time: real steps are slower
- a round is K draft steps and a target pass over K + 1 rows, which reads a sequence's KV once
- guesses are kept independently, with the same chance
- int4 is multiplied in bf16, fp8 in fp8 where the device can; embeddings and head have 16 bits
- tokens choose experts independently and evenly; devices share evenly, communication is free
- memory is counted for weights and KV alone"""


def card(settings: Settings) -> str:
    """Text of one screen for each precision."""
    lines = [f"{_pair(settings)} on {device_line(settings.device)}"]
    lines += map(model_line, settings.models)
    lines += [f"note: {note}" for note in (*settings.notes(), *_options(settings))]
    for precision in settings.precisions:
        lines += ["", *_block(settings, precision)]
    return "\n".join([*lines, LEGEND])


def _pair(settings: Settings) -> str:
    draft = settings.draft.name if settings.draft else "free guesses"
    return f"{settings.target.name} with {draft}"


def _options(settings: Settings) -> Iterator[str]:
    """What differs from the defaults and changes every figure."""
    if settings.kv != "bf16":
        yield f"KV cache in {settings.kv}"
    if settings.draft and settings.draft_precision:
        yield f"draft weights in {settings.draft_precision}"
    if settings.launch:
        yield f"{duration(settings.launch)} of overhead a layer"


def device_line(device: Device) -> str:
    """`4 x h100-sxm: 13400 GB/s, 3958 TFLOP/s (fp8 7916), 320 GB`."""
    fp8 = f" (fp8 {_rate(device.fp8_flops)})" if device.fp8_flops else ""
    memory = f", {amount(device.memory)}" if device.memory is not None else ""
    return (
        f"{device.count} x {device.name}: {device.bandwidth / 1e9:.0f} GB/s, "
        f"{_rate(device.bf16_flops)} TFLOP/s{fp8}{memory}"
    )


def _rate(flops: float) -> str:
    """TFLOP/s: `2.5`, `989`."""
    return f"{flops / 1e12:.0f}" if flops >= 1e14 else f"{flops / 1e12:.3g}"


def model_line(shape: ModelShape) -> str:
    experts = ""
    if shape.experts is not None:
        experts = (
            f", {_weights(shape.active_parameters)} of them for a token "
            f"({shape.experts.per_token} of {shape.experts.count} experts)"
        )
    return (
        f"{shape.name}: {_weights(shape.parameters)} weights{experts}, {shape.layers} layers, "
        f"{shape.kv_values_per_token} numbers of KV a token"
    )


def _weights(count: int) -> str:
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


def _block(settings: Settings, precision: str) -> Iterator[str]:
    point = settings.point(precision)
    sizes = " + ".join(amount(model.weight_bytes) for model in point.models)
    yield f"{precision}: weights {sizes}{_room(point)}"
    if point.kv_tokens == 0:
        return
    yield (
        f"a step at batch {point.batch}, context {point.context}: target "
        f"{duration(point.target_seconds(0))}, draft {duration(point.draft_seconds)}, "
        f"c = {point.draft_cost:.3f}; "
        f"K = 0 gives {point.batch / point.target_seconds(0):.4g} tokens/s"
    )
    speeds = " ".join(f"a={acceptance:.1f}".rjust(6) for acceptance in ACCEPTANCES)
    yield f"   K  round  verify  break-even  {speeds}"
    for k in (k for k in SHOWN_KS if k <= settings.k_max):
        cost, least = point.round_cost(k), break_even(k, point.round_cost(k))
        shown = "never" if least is None else f"{least:.3f}"
        speeds = " ".join(f"{point.speed_up(acceptance, k):5.2f}x" for acceptance in ACCEPTANCES)
        yield f"{k:4}{cost:7.2f}{point.verify_cost(k):8.2f}{shown:>12}  {speeds}"
    yield f"best K and speed-up at acceptance {settings.acceptance:g}, by batch and context"
    heads = (f"{c // 1024}k" if c % 1024 == 0 else str(c) for c in settings.contexts)
    yield " batch" + "".join(head.rjust(13) for head in heads)
    for batch in settings.batches:
        row = [settings.scenario(precision, batch, context) for context in settings.contexts]
        yield f"{batch:6}" + "".join(_cell(settings, cell).rjust(13) for cell in row)


def _room(point: Scenario) -> str:
    device = point.target.device
    if point.kv_tokens is None or device.memory is None:
        return ""
    if point.kv_tokens:
        return f"; beside them the memory holds the KV of {point.kv_tokens} tokens"
    least = math.ceil(point.weight_bytes / device.memory * device.count)
    return f"; they do not fit {amount(device.memory)}: --devices {least} or more"


def _cell(settings: Settings, cell: Scenario) -> str:
    if not cell.within_positions:
        return "too long"
    k, speed_up = cell.best(settings.acceptance, settings.k_max)
    return "KV too large" if cell.fits is False else f"{k} {speed_up:5.2f}x"


def draw(settings: Settings, name: str) -> None:
    """Speed-up and best K over the batch, a curve for each context, as a PNG. Raises
    ConfigError where matplotlib is missing or the name does not fit."""
    count = len(settings.precisions)
    with picture(name, (4 * count + 1, 6)) as figure:
        axes = figure.subplots(2, count, squeeze=False, sharex=True, sharey="row")
        for column, precision in enumerate(settings.precisions):
            _panel(axes[0][column], axes[1][column], settings, precision)
        axes[0][0].set_ylabel("speed-up at the best K")
        axes[1][0].set_ylabel("best K")
        axes[0][-1].legend(title="context")
        device = f"{settings.device.count} x {settings.device.name}"
        figure.suptitle(
            f"{_pair(settings)} on {device}, acceptance {settings.acceptance:g}; on paper"
        )


def _panel(speeds: Axes, ks: Axes, settings: Settings, precision: str) -> None:
    """Of what fits the memory and the positions."""
    for context in settings.contexts:
        cells = [settings.scenario(precision, batch, context) for batch in sorted(settings.batches)]
        shown = [cell for cell in cells if cell.within_positions and cell.fits is not False]
        best = [cell.best(settings.acceptance, settings.k_max) for cell in shown]
        batches = [cell.batch for cell in shown]
        speeds.plot(batches, [speed for _, speed in best], "o-", label=str(context))
        ks.plot(batches, [k for k, _ in best], "o-")
    speeds.axhline(1, color="grey", linewidth=0.8)
    speeds.set_title(precision)
    ks.set_xscale("log", base=2)
    ks.xaxis.set_major_formatter("{x:.0f}")
    ks.set_xlabel("batch")
