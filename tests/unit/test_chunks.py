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
from server.api.sse import ChunkShape, Outlet, events
from server.generation.choice import Delta
from server.generation.generation import Generation
from server.generation.generation_spec import GenerationSpec
from server.observe.metrics import Metrics
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
EOS = make_ready().eos_ids[0]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("shape", SHAPES, ids=["completions", "chat"])
def test_spliced_and_written_choices_are_the_same(shape: ChunkShape, text: str) -> None:
    """`around` is a second way to write what `choices` says, so it is held to the first."""
    around = shape.around(3)
    assert around is not None
    spliced = around[0] + json.dumps(text, ensure_ascii=False) + around[1]
    [choice] = shape.choices(Delta(3, text, None, None))
    assert spliced == json.dumps(choice, ensure_ascii=False, separators=(",", ":"))


def begun(
    client: FakeClient, *, include_usage: bool = False, n: int = 1, stop: tuple[str, ...] = ()
) -> Call:
    params = SamplingParams(seed=1, max_tokens=50, stop_token_ids=(EOS,))
    spec = GenerationSpec(id="x", prompts=[[1]], params=params, context=512, n=n, stop=stop)
    generation = Generation(spec, client=client, tokenizer=ByteTokenizer(), metrics=Metrics())
    generation.start(arrival=0.0)
    return Call(
        id='x"y', created=1, model="m\u2028", fingerprint="fp", seed=1,
        include_usage=include_usage, generation=generation, service_tier="auto",
    )  # fmt: skip


def stream(shape: ChunkShape, *, include_usage: bool, n: int = 1) -> list[dict[str, Any]]:
    async def main() -> bytes:
        client = FakeClient(script=listed_script('say "hä"\n'.encode(), then=EOS))
        call = begun(client, include_usage=include_usage, n=n)
        return b"".join([piece async for piece in events(call, shape, {"more": [1]}, Outlet())])

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


class Wire:
    """A Writer that takes as many pieces in a row as `patience` says, then none until something was
    sent past it. What came over it and past it, in the order in which it came."""

    def __init__(self, patience: int | None) -> None:
        self.num_written = 0
        self.sent: list[bytes] = []
        self._patience = patience
        self._left = patience

    @property
    def is_open(self) -> bool:
        return self._left != 0

    def write(self, piece: bytes) -> None:
        assert self.is_open
        self.num_written += 1
        self._left = None if self._left is None else self._left - 1
        self.sent.append(piece)

    def send(self, piece: bytes) -> None:
        self._left = self._patience
        self.sent.append(piece)


async def over(wire: Wire, call: Call, kind: str) -> str:
    shape = CompletionChunks() if kind == "completions" else ChatChunks("id")
    outlet = Outlet()
    outlet.writer = wire
    async for piece in events(call, shape, {}, outlet):
        wire.send(piece)
    return b"".join(wire.sent).decode()


@pytest.mark.parametrize("kind", ["completions", "chat"])
@pytest.mark.parametrize(("n", "stop"), [(1, ()), (1, ("b",)), (2, ())])
@pytest.mark.parametrize("per_step", [1, 3])
def test_what_is_written_past_the_task_is_the_same_stream(
    kind: str, n: int, stop: tuple[str, ...], per_step: int
) -> None:
    """Law: whether a chunk leaves while its task sleeps or by the task, and whatever the connection
    refuses in between, the events are the same in the same order."""

    async def told(patience: int | None) -> tuple[str, int]:
        script = listed_script('a "ä" 日本 \U0001f468 b\n'.encode(), then=EOS)
        gate = asyncio.Semaphore(0)
        client = FakeClient(script=script, tokens_per_step=per_step, gate=gate)
        wire = Wire(patience)
        reading = asyncio.create_task(over(wire, begun(client, n=n, stop=stop), kind))
        while not reading.done():
            for _ in range(n):
                gate.release()
            for _ in range(10):  # whichever way it takes, it is gone before the next step
                await asyncio.sleep(0)
        return reading.result(), wire.num_written

    expected, none = asyncio.run(told(0))
    assert none == 0
    assert expected.endswith("data: [DONE]\n\n")
    for patience in (None, 1, 2):
        text, written = asyncio.run(told(patience))
        assert text == expected
        assert written > 0


@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_an_engine_that_is_lost_is_told_once(kind: str) -> None:
    """Its error comes up in a function that no task called: the stream ends with it all the same,
    after what had come, and without [DONE]."""

    async def main() -> str:
        gate = asyncio.Semaphore(0)
        client = FakeClient(script=listed_script(b"abc", then=EOS), gate=gate)
        call, wire = begun(client), Wire(None)
        reading = asyncio.create_task(over(wire, call, kind))
        for _ in range(3):
            gate.release()
            await asyncio.sleep(0.01)
        client.die("it is gone")
        return await asyncio.wait_for(reading, 30)

    *_, third, error, rest = asyncio.run(main()).split("\n\n")
    assert '"c"' in third
    assert "it is gone" in error
    assert rest == ""


def test_a_chunk_that_cannot_be_written_ends_the_stream(caplog: pytest.LogCaptureFixture) -> None:
    """A mistake of ours in that function must not leave a client waiting for ever."""

    async def main() -> str:
        client = FakeClient(script=listed_script(b"abc", then=EOS))
        call, outlet, sent = begun(client), Outlet(), list[bytes]()

        class Broken(CompletionChunks):
            def choices(self, delta: Delta) -> list[dict[str, Any]]:
                if delta.finish is not None:
                    raise LookupError("oops")
                return super().choices(delta)

        outlet.writer = Wire(None)
        async for piece in events(call, Broken(), {}, outlet):
            sent.append(piece)
        assert client.inflight == 0
        return b"".join(sent).decode()

    assert '"error"' in asyncio.run(main())
    assert "internal error" in caplog.text
