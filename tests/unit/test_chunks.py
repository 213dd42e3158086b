"""Stream chunks: all have the same head, the seed comes first and last, the stream ends once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from engine.messages import SamplingParams
from server.api.chunks import ChunkWriter
from server.api.completions import CHUNK, TEXT
from server.api.intake import Call
from server.api.schema import CompletionRequest
from server.api.shapes import ChatShape, CompletionShape
from server.api.sse import events
from server.generation.choice import Delta
from server.generation.generation import Generation
from server.generation.generation_spec import GenerationSpec
from server.observe.metrics import Metrics
from tests.support import timeless
from tests.support.byte_tokenizer import ByteTokenizer
from tests.support.fake_client import FakeClient, listed_script, make_ready

EOS = make_ready().eos_ids[0]


def begun(
    client: FakeClient,
    *,
    include_usage: bool = False,
    continuous: bool = False,
    n: int = 1,
    stop: tuple[str, ...] = (),
    seconds: float | None = None,
) -> Call:
    params = SamplingParams(seed=1, max_tokens=50, stop_token_ids=(EOS,))
    spec = GenerationSpec(
        id="x", prompts=[[1]], params=params, context=512, n=n, stop=stop, seconds=seconds
    )
    streams = spec.submit(client, arrival=0.0)
    generation = Generation(
        spec, streams, client=client, tokenizer=ByteTokenizer(), metrics=Metrics()
    )
    options = {"include_usage": include_usage, "continuous_usage_stats": continuous}
    fields = {"model": "m\u2028", "prompt": "a", "service_tier": "auto"}
    request = CompletionRequest.read({**fields, "stream": True, "stream_options": options})
    return Call(
        request=request, id='x"y', created=1, fingerprint="fp", seed=1, generation=generation
    )


def pieces(call: Call, kind: str, **extra: Any) -> AsyncGenerator[bytes, None]:
    if kind == "completions":
        return events(call, ChunkWriter(call, TEXT, CompletionShape().choices, **extra))
    return events(call, ChunkWriter(call, CHUNK, ChatShape("id").choices, **extra))


def stream(
    kind: str, *, include_usage: bool, continuous: bool = False, n: int = 1
) -> list[dict[str, Any]]:
    async def main() -> bytes:
        client = FakeClient(script=listed_script('say "hä"\n'.encode(), then=EOS))
        call = begun(client, include_usage=include_usage, continuous=continuous, n=n)
        return b"".join([piece async for piece in pieces(call, kind, first={"more": [1]})])

    *found, done, rest = asyncio.run(main()).decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in found]


@pytest.mark.parametrize("include_usage", [False, True])
@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_all_chunks_of_a_stream_have_one_head(kind: str, include_usage: bool) -> None:
    """Law: all have the same keys in the same order; the seed is on the first and the last. Bug:
    the last chunk had usage although the request had not asked for it."""
    chunks = stream(kind, include_usage=include_usage, n=2)
    heads = [{k: v for k, v in c.items() if k not in ("choices", "usage", "seed", "more")}
             for c in chunks]  # fmt: skip
    assert all(head == heads[0] for head in heads)
    assert heads[0]["service_tier"] == "default"
    assert [i for i, c in enumerate(chunks) if "seed" in c] == [0, len(chunks) - 1]
    assert [i for i, c in enumerate(chunks) if "more" in c] == [0]
    assert all(("usage" in c) == include_usage for c in chunks)
    counts = [c["usage"]["completion_tokens"] for c in chunks if c.get("usage")]
    assert counts == ([2 * 11] if include_usage else [])
    for index in (0, 1):
        choices = [
            c["choices"][0] for c in chunks if c["choices"] and c["choices"][0]["index"] == index
        ]
        texts = [c["text"] if "text" in c else c["delta"].get("content", "") for c in choices]
        assert "".join(texts) == 'say "hä"\n'
        assert [c["finish_reason"] for c in choices][-1] == "stop"
        assert sum(c["finish_reason"] is not None for c in choices) == 1


@pytest.mark.parametrize("include_usage", [False, True])
@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_continuous_usage_is_on_every_chunk(kind: str, include_usage: bool) -> None:
    """Law: usage grows to that of the whole reply; with `include_usage`, a last chunk without
    choices repeats it."""
    chunks = stream(kind, include_usage=include_usage, continuous=True, n=2)
    counts = [c["usage"]["completion_tokens"] for c in chunks]
    assert counts == sorted(counts)
    assert (len({*counts}) > 2, counts[-1]) == (True, 2 * 11)
    assert all(c["usage"]["prompt_tokens"] == 1 for c in chunks)
    assert [bool(c["choices"]) for c in chunks][-1] is not include_usage


@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_a_lost_engine_is_reported_once(kind: str) -> None:
    """Law: the stream ends with the error, after all earlier output, and without [DONE]."""

    async def read(call: Call) -> str:
        return b"".join([piece async for piece in pieces(call, kind)]).decode()

    async def main() -> str:
        gate = asyncio.Semaphore(0)
        client = FakeClient(script=listed_script(b"abc", then=EOS), gate=gate)
        reading = asyncio.create_task(read(begun(client)))
        for _ in range(3):
            gate.release()
            await asyncio.sleep(0.01)
        client.die("it is gone")
        return await asyncio.wait_for(reading, 30)

    *_, third, error, rest = timeless.run(main()).split("\n\n")
    assert '"c"' in third
    assert "it is gone" in error
    assert rest == ""


def test_a_chunk_that_cannot_be_written_ends_the_stream(caplog: pytest.LogCaptureFixture) -> None:
    """Bug: an internal error would leave the client waiting for ever."""

    def choices(delta: Delta) -> list[dict[str, Any]]:
        if delta.finish is not None:
            raise LookupError("oops")
        return CompletionShape().choices(delta)

    async def main() -> str:
        client = FakeClient(script=listed_script(b"abc", then=EOS))
        call = begun(client)
        writer = ChunkWriter(call, TEXT, choices)
        text = b"".join([piece async for piece in events(call, writer)])
        assert client.inflight == 0
        return text.decode()

    assert '"error"' in asyncio.run(main())
    assert "internal error" in caplog.text


@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_what_arrived_before_the_deadline_is_sent_to_a_slow_reader(kind: str) -> None:
    """Bug: the deadline took the end of a reply out of the mailboxes while its client was not
    reading; the stream then ended without that text and without a finish reason, and repeated the
    chunk before."""

    async def main() -> str:
        gate = asyncio.Semaphore(1)
        client = FakeClient(gate=gate, script=listed_script(b"ABCDEFGH", then=EOS))
        call, found = begun(client, seconds=0.05), list[bytes]()
        opening = [{"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}]
        async for piece in pieces(call, kind, opening=opening if kind == "chat" else []):
            found.append(piece)
            if len(found) == 1:  # the engine ends the reply; the client reads on after the deadline
                for _ in range(20):
                    gate.release()
                await asyncio.sleep(0.15)
        return b"".join(found).decode()

    sent = timeless.run(main())
    chunks = [json.loads(each[6:]) for each in sent.split("\n\n") if each.startswith("data: {")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    texts = [each.get("text", each.get("delta", {}).get("content")) or "" for each in choices]
    assert "".join(texts) == "ABCDEFGH"
    assert choices[-1]["finish_reason"] == "stop"
    assert sent.endswith("data: [DONE]\n\n")
