"""`foredraft plan --examples`: a claim worked out by the functions of a plan, and where to read
others off."""

from __future__ import annotations

from collections.abc import Iterator

from engine.lab.plan.card import amount, duration
from engine.lab.plan.presets import find_model
from engine.lab.plan.roofline import Served, device_of

TARGET = "llama-3.1-70b"

OTHERS = """\
2. Speculation fades as batches grow: read down a column of
   foredraft plan --target llama-3.1-70b --draft llama-3.2-1b --device h100-sxm --devices 8
3. Verification in a mixture of experts touches more experts at small batch: set
   foredraft plan --target qwen3-30b-a3b --device h100-sxm --devices 2
   against --target qwen3-32b
4. A 1B draft for a 70B target keeps to Leviathan's formula, (1 - a^(K+1)) / (1 - a) / (1 + K c),
   while verifying is bound by reading weights: the table of K in the first of these"""


def examples() -> str:
    """As text."""
    return "\n".join([*cache_reads(), "", OTHERS])


def cache_reads() -> Iterator[str]:
    """Verification reads a sequence's cache once for all of its rows."""
    served = Served(find_model(TARGET, "target"), device_of("h100-sxm", 8), "bf16")
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
