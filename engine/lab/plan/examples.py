"""`foredraft plan --examples`: claims about speculation, worked out by the functions of a plan."""

from __future__ import annotations

from collections.abc import Iterator

from engine.lab.plan.card import amount, duration
from engine.lab.plan.presets import find_model
from engine.lab.plan.roofline import DEVICES, Device, Scenario, Served

ACCEPTANCE, K_MAX = 0.8, 16
TARGET, DRAFT = "llama-3.1-70b", "llama-3.2-1b"
DENSE, MIXTURES = "qwen3-32b", ("qwen3-30b-a3b", "mixtral-8x7b")
BATCHES = (1, 4, 16, 64, 256)
EIGHT, TWO = DEVICES["h100-sxm"].times(8), DEVICES["h100-sxm"].times(2)


def examples() -> str:
    """All three, as text."""
    return "\n\n".join("\n".join(part) for part in (cache_reads(), fading(), mixtures()))


def scenario(
    target: str, draft: str | None, device: Device, *, batch: int = 1, context: int = 2048
) -> Scenario:
    """bf16 everywhere, no overhead."""
    models = [
        Served(find_model(name, "target"), device, "bf16") for name in (target, draft) if name
    ]
    return Scenario(models[0], models[1] if draft else None, batch, context)


def cache_reads() -> Iterator[str]:
    """Verification reads a sequence's cache once for all of its rows."""
    served = scenario(TARGET, None, EIGHT).target
    weights = sum(part.bytes for part in served.parts(batch=1, tokens=1, context=0)) / 1e9
    each = f"{served.kv_bytes_per_token / 1e3:.1f} kB"
    yield "1. Ten tokens of one query read its KV cache once; ten queries of one token read ten"
    yield (
        f"   {TARGET}, bf16: a pass reads {weights:.1f} GB of weights; KV of a token: "
        f"{served.shape.layers} layers x {served.shape.attention.kv_values} numbers x 2 bytes = "
        f"{each}"
    )
    for context in (2048, 131_072):
        cache = served.cache_bytes(context)
        yield f"   context {context // 1024}k: KV {context} x {each} = {amount(cache)}"
        seconds = []
        for name, batch in (("one query, 10 tokens", 1), ("ten queries", 10)):
            seconds.append(served.seconds(batch=batch, tokens=10 // batch, context=context))
            yield (
                f"     {name + ':':22}{weights:.1f} + {batch:2} x {cache / 1e9:.2f} = "
                f"{weights + batch * cache / 1e9:6.1f} GB, {duration(seconds[-1])} on 8 x h100-sxm"
            )
        yield f"     the second is {seconds[1] / seconds[0]:.2f} times the first"
    yield "   So verification is the cheapest kind of batch, the more so the longer the context."


def fading() -> Iterator[str]:
    """Batches use up the arithmetic that verification lives on."""
    yield "2. Speculation fades as batches grow"
    yield f"   {TARGET} with {DRAFT}, 8 x h100-sxm, bf16, context 2k, acceptance {ACCEPTANCE}"
    yield "   batch  plain step  T(K=4)/T(K=0)  c      best K  speed-up"
    for batch in BATCHES:
        point = scenario(TARGET, DRAFT, EIGHT, batch=batch)
        k, speed = point.best(ACCEPTANCE, K_MAX)
        yield (
            f"   {batch:5}  {duration(point.target_seconds(0)):>10}  {point.verify_cost(4):13.2f}"
            f"  {point.draft_cost:.3f}  {k:6}  {speed:7.2f}x"
        )


def mixtures() -> Iterator[str]:
    """Few rows touch few experts, so at small batches every guess reads more weights."""
    yield "3. Verification in a mixture of experts touches more experts at small batch"
    for name in MIXTURES:
        experts = find_model(name, "target").experts
        assert experts is not None, f"{name} is a mixture"
        touched = ", ".join(f"n={n}: {experts.touched(n):.1f}" for n in (1, 2, 5, 16, 64, 256))
        yield f"   {name}: of {experts.count} experts, n rows touch {touched}"
    yield (
        f"   T(K=4)/T(K=0), then best K and speed-up of free guesses at acceptance {ACCEPTANCE}; "
        "2 x h100-sxm, bf16, context 2k"
    )
    names = (DENSE, *MIXTURES)
    yield "   batch" + "".join(name.rjust(24) for name in names)
    for batch in BATCHES:
        cells = []
        for name in names:
            point = scenario(name, None, TWO, batch=batch)
            k, speed = point.best(ACCEPTANCE, K_MAX)
            cells.append(f"{point.verify_cost(4):.2f}, {k:2} {speed:.2f}x")
        yield f"   {batch:5}" + "".join(cell.rjust(24) for cell in cells)
