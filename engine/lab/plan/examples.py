"""`foredraft plan --examples`: the classic claims about speculation, worked out.

Every figure is computed here by the same functions that make a plan.
"""

from __future__ import annotations

from collections.abc import Iterator

from engine.lab.plan import closed_forms
from engine.lab.plan.card import amount, duration
from engine.lab.plan.device import DEVICES, Device
from engine.lab.plan.find_model import find_model
from engine.lab.plan.numerics import PRECISIONS
from engine.lab.plan.roofline import Served
from engine.lab.plan.scenario import Scenario

ACCEPTANCE = 0.8
K_MAX = 16
TARGET, DRAFT = "llama-3.1-70b", "llama-3.2-1b"
DENSE, MIXTURES = "qwen3-32b", ("qwen3-30b-a3b", "mixtral-8x7b")
BATCHES = (1, 4, 16, 64, 256)


def examples() -> str:
    """All four, as text."""
    parts = (cache_reads(), fading(), mixtures(), draft_of_1b())
    return "\n\n".join("\n".join(part) for part in parts)


def scenario(
    target: str, draft: str | None, device: Device, *, batch: int = 1, context: int = 2048
) -> Scenario:
    """bf16 everywhere, no overhead."""

    def served(name: str) -> Served:
        return Served(find_model(name, "target"), device, PRECISIONS["bf16"])

    return Scenario(served(target), served(draft) if draft else None, batch, context)


def eight() -> Device:
    return DEVICES["h100-sxm"].times(8)


def cache_reads() -> Iterator[str]:
    """Verification reads a sequence's cache once for all of its rows."""
    point = scenario(TARGET, None, eight())
    served, attention = point.target, point.target.shape.attention
    yield "1. Ten tokens of one query read its KV cache once; ten queries of one token read ten"
    weights = served.forward(batch=1, tokens=1, context=0).weight_bytes
    yield (
        f"   {TARGET}, bf16: a pass reads {weights / 1e9:.1f} GB of weights; KV of a token: "
        f"{served.shape.layers} layers x {attention.kv_values} numbers x 2 bytes = "
        f"{served.kv_bytes_per_token / 1e3:.1f} kB"
    )
    for context in (2048, 131_072):
        cache = served.cache_bytes(context)
        one = served.forward(batch=1, tokens=10, context=context)
        ten = served.forward(batch=10, tokens=1, context=context)
        each = f"{served.kv_bytes_per_token / 1e3:.1f} kB"
        yield f"   context {context // 1024}k: KV {context} x {each} = {amount(cache)}"
        for name, times, forward in (("one query, 10 tokens", 1, one), ("ten queries", 10, ten)):
            yield (
                f"     {name + ':':22}{weights / 1e9:.1f} + {times:2} x {cache / 1e9:.2f} = "
                f"{forward.bytes / 1e9:6.1f} GB, {duration(forward.seconds)} on 8 x h100-sxm"
            )
        yield f"     the second is {ten.seconds / one.seconds:.2f} times the first"
    yield "   So verification is the cheapest kind of batch, the more so the longer the context."


def fading() -> Iterator[str]:
    """Batches use up the arithmetic that verification lives on."""
    point = scenario(TARGET, DRAFT, eight())
    forward = point.target.forward(batch=1, tokens=1, context=2048)
    read = forward.weight_bytes / point.target.device.bandwidth
    compute = 2 * point.target.shape.active_parameters / point.target.device.bf16_flops
    yield "2. Speculation fades as batches grow"
    yield (f"   {TARGET} with {DRAFT}, 8 x h100-sxm, bf16, context 2k, acceptance {ACCEPTANCE}")
    yield (
        f"   reading the weights takes {duration(read)}, multiplying a row by them "
        f"{duration(compute)}: {read / compute:.0f} rows cost no more than one"
    )
    yield "   batch  plain step  rows at K=4  T(K=4)/T(K=0)  c      best K  speed-up"
    for batch in BATCHES:
        point = scenario(TARGET, DRAFT, eight(), batch=batch)
        k, speed = point.best(ACCEPTANCE, K_MAX)
        yield (
            f"   {batch:5}  {duration(point.target_seconds(0)):>10}  {batch * 5:11}  "
            f"{point.target_seconds(4) / point.target_seconds(0):13.2f}  {point.draft_cost:.3f}  "
            f"{k:6}  {speed:7.2f}x"
        )


def mixtures() -> Iterator[str]:
    """Few rows touch few experts, so at small batches every guess reads more weights."""
    yield "3. Verification in a mixture of experts touches more experts at small batch"
    for name in MIXTURES:
        experts = find_model(name, "target").experts
        assert experts is not None, f"{name} is a mixture"
        count, chosen = experts.count, experts.per_token
        yield (
            f"   {name}: {chosen} of {count} experts a token; n rows touch "
            f"{count} (1 - (1 - {chosen}/{count})^n)"
        )
        rows = (1, 2, 5, 16, 64, 256)
        yield "     " + ", ".join(f"n={n}: {experts.touched(n):.1f}" for n in rows)
    yield (
        f"   T(K=4)/T(K=0), then best K and speed-up of free guesses at acceptance {ACCEPTANCE}; "
        "2 x h100-sxm, bf16, context 2k"
    )
    names = (DENSE, *MIXTURES)
    yield "   batch" + "".join(name.rjust(24) for name in names)
    for batch in BATCHES:
        cells = []
        for name in names:
            point = scenario(name, None, DEVICES["h100-sxm"].times(2), batch=batch)
            k, speed = point.best(ACCEPTANCE, K_MAX)
            cells.append(
                f"{point.target_seconds(4) / point.target_seconds(0):.2f}, {k:2} {speed:.2f}x"
            )
        yield f"   {batch:5}" + "".join(cell.rjust(24) for cell in cells)
    point = scenario(MIXTURES[0], None, DEVICES["h100-sxm"].times(2))
    yield (
        f"   At batch 1, acceptance 0.5, four guesses give {MIXTURES[0]} "
        f"{closed_forms.expected_tokens(0.5, 4):.2f} tokens for {point.round_cost(4):.2f} plain "
        f"steps: {point.speed_up(0.5, 4):.2f}x, a loss."
    )


def draft_of_1b() -> Iterator[str]:
    """Leviathan's formula with the roofline's costs."""
    point = scenario(TARGET, DRAFT, eight())
    cost = point.draft_cost
    yield f"4. A 1B draft for a 70B target at acceptance {ACCEPTANCE}"
    yield f"   {TARGET} with {DRAFT}, 8 x h100-sxm, bf16, batch 1, context 2k"
    yield (
        f"   target step {duration(point.target_seconds(0))}, draft step "
        f"{duration(point.draft_seconds)}: c = {cost:.4f}"
    )
    yield "   tokens a round: (1 - a^(K+1)) / (1 - a); speed-up: that / (1 + K c) (Leviathan)"
    yield "   K  tokens  formula               roofline"
    for k in (1, 2, 4, 8, 12, 16):
        tokens = closed_forms.expected_tokens(ACCEPTANCE, k)
        formula = closed_forms.speed_up(ACCEPTANCE, k, cost)
        yield (
            f"  {k:2}  {tokens:6.3f}  / {1 + k * cost:.3f} = {formula:5.3f}x   "
            f"{point.speed_up(ACCEPTANCE, k):9.3f}x"
        )
    best = closed_forms.best(lambda k: closed_forms.speed_up(ACCEPTANCE, k, cost), K_MAX)
    ours = point.best(ACCEPTANCE, K_MAX)
    yield (
        f"   best by the formula: K = {best[0]}, {best[1]:.2f}x; by the roofline, where rows "
        f"cost something: K = {ours[0]}, {ours[1]:.2f}x"
    )
