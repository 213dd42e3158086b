"""A chunk that says only text is put together of ready pieces; it must not differ from the rest."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from engine.messages import SamplingParams
from server.api.chat import ChatChunks
from server.api.completions import CompletionChunks
from server.api.intake import Call
from server.api.sse import ChunkShape, events
from server.choice import Delta
from server.generation import Generation
from server.generation_spec import GenerationSpec
from server.metrics import Metrics
from tests.support.byte_tokenizer import ByteTokenizer
from tests.support.fake_client import FakeClient, listed_script, make_ready

TEXTS = [
    "plain",
    'a "quote" \\ and a\nline',
    "\x00\x1f\x7f\u2028\u2029",
    "日本語 \U0001f468",
    "</s>",
]
SHAPES = [CompletionChunks(), ChatChunks("id")]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("shape", SHAPES, ids=["completions", "chat"])
def test_spliced_and_written_choices_are_the_same(shape: ChunkShape, text: str) -> None:
    """`around` is a second way to write what `choices` says, so it is held to the first."""
    around = shape.around(3)
    assert around is not None
    spliced = around[0] + json.dumps(text, ensure_ascii=False) + around[1]
    [choice] = shape.choices(Delta(3, text, None, None))
    assert spliced == json.dumps(choice, ensure_ascii=False, separators=(",", ":"))


def stream(shape: ChunkShape, *, include_usage: bool, n: int = 1) -> list[dict[str, Any]]:
    async def main() -> bytes:
        text = 'say "hä"\n'.encode()
        eos = make_ready().eos_ids[0]
        client = FakeClient(script=listed_script(text, then=eos))
        params = SamplingParams(seed=1, max_tokens=50, stop_token_ids=(eos,))
        spec = GenerationSpec(id="x", prompts=[[1]], params=params, context=512, n=n)
        generation = Generation(spec, client=client, tokenizer=ByteTokenizer(), metrics=Metrics())
        generation.start(arrival=0.0)
        call = Call(
            id='x"y', created=1, model="m\u2028", fingerprint="fp", seed=1,
            include_usage=include_usage, generation=generation, service_tier="auto",
        )  # fmt: skip
        return b"".join([piece async for piece in events(call, shape, {"more": [1]})])

    *told, done, rest = asyncio.run(main()).decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in told]


@pytest.mark.parametrize("include_usage", [False, True])
@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_all_chunks_of_a_stream_have_one_head(kind: str, include_usage: bool) -> None:
    """Whichever way a chunk was written: same keys in the same order, the seed first and last."""
    shape = CompletionChunks() if kind == "completions" else ChatChunks("id")
    chunks = stream(shape, include_usage=include_usage, n=2)
    heads = [{k: v for k, v in c.items() if k not in ("choices", "usage", "seed", "more")}
             for c in chunks]  # fmt: skip
    assert all(head == heads[0] for head in heads)
    assert heads[0]["service_tier"] == "default"
    assert [i for i, c in enumerate(chunks) if "seed" in c] == [0, len(chunks) - 1]
    assert [i for i, c in enumerate(chunks) if "more" in c] == [0]
    assert all(("usage" in c) == include_usage for c in chunks[:-1])
    assert chunks[-1]["usage"]["completion_tokens"] == 2 * 11
    for index in (0, 1):
        said = [
            c["choices"][0] for c in chunks if c["choices"] and c["choices"][0]["index"] == index
        ]
        texts = [c["text"] if "text" in c else c["delta"].get("content", "") for c in said]
        assert "".join(texts) == 'say "hä"\n'
        assert [c["finish_reason"] for c in said][-1] == "stop"
        assert sum(c["finish_reason"] is not None for c in said) == 1
