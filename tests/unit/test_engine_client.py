"""Streams and the engine client, against a hand-driven peer on real sockets (no process)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from engine.errors import EngineLost
from engine.messages import (
    Abort,
    Estimates,
    Event,
    Fatal,
    FinishReason,
    Output,
    Outputs,
    SamplingParams,
    SetSpeculation,
    StepMetrics,
    Submit,
    Swap,
    SwapDraft,
    SwapOutcome,
    TokenLogprobs,
)
from server.engine.client import EngineClient
from server.engine.events import EVENTS_AT_ONCE
from server.engine.mailbox import Stream
from tests.support.fake_client import make_ready
from tests.support.peer import Peer, connected, heard
from tests.support.streams import read, take

PARAMS = SamplingParams(seed=1, max_tokens=10)


def mailbox(id: str) -> Stream:
    return Stream(Submit(id, [1], PARAMS, 0.0))


def logprob(token: int) -> TokenLogprobs:
    return TokenLogprobs(token=token, logprob=-1.0, top=[])


# -- the mailbox ------------------------------------------------------------------------------


def test_unread_outputs_merge_into_one() -> None:
    """Law: unread outputs become one Output: tokens appended, counters replaced, finish kept."""

    async def scenario() -> Output:
        stream = mailbox("a")
        stream.put(
            Output(
                id="a",
                tokens=[1, 2],
                logprobs=[logprob(1), logprob(2)],
                prompt_logprobs=[None, logprob(9)],
                cached_tokens=16,
                queued=0.5,
                rounds=1,
                proposed=4,
                accepted=1,
                sources=[("ngram", 1), ("target", 1)],
            )
        )
        stream.put(
            Output(
                id="a",
                tokens=[3],
                sources=[("target", 1)],
                logprobs=[logprob(3)],
                rounds=2,
                proposed=8,
            )
        )
        stream.put(Output(id="a", tokens=[4], logprobs=[logprob(4)], finish="stop", stop_token=4))
        return await read(stream)

    merged = asyncio.run(scenario())
    assert merged == Output(
        id="a",
        tokens=[1, 2, 3, 4],
        logprobs=[logprob(token) for token in (1, 2, 3, 4)],
        prompt_logprobs=[None, logprob(9)],
        cached_tokens=16,
        queued=0.5,
        finish="stop",
        stop_token=4,
        sources=[("ngram", 1), ("target", 1), ("target", 1)],
    )


def test_output_is_read_only_once() -> None:
    """Law: `take` takes: the second Output starts from nothing, one-time fields included."""

    async def scenario() -> tuple[Output, Output]:
        stream = mailbox("a")
        stream.put(Output(id="a", tokens=[1], cached_tokens=0))
        first = await read(stream)
        stream.put(Output(id="a", tokens=[2], finish="length"))
        return first, await read(stream)

    first, second = asyncio.run(scenario())
    assert first == Output(id="a", tokens=[1], cached_tokens=0)
    assert second == Output(id="a", tokens=[2], finish="length")


def test_a_reader_waits_for_the_next_output() -> None:
    """Law: a reader sleeps while there is no output, and wakes for the next one."""

    async def scenario() -> Output:
        stream = mailbox("a")
        reader = asyncio.create_task(read(stream))
        await asyncio.sleep(0)
        assert not reader.done()
        stream.put(Output(id="a", tokens=[1]))
        return await reader

    assert asyncio.run(scenario()).tokens == [1]


def test_a_lost_engine_is_reported_after_the_tokens() -> None:
    """Law: tokens that arrived before the loss are returned first; then EngineLost is raised."""

    async def scenario() -> None:
        stream = mailbox("a")
        stream.put(Output(id="a", tokens=[1]))
        stream.fail("it is gone")
        assert (await read(stream)).tokens == [1]
        with pytest.raises(EngineLost, match="it is gone"):
            await read(stream)

    asyncio.run(scenario())


@pytest.mark.parametrize("end", ["finish", "fail"])
def test_a_second_terminal_event_is_refused(end: str) -> None:
    """Law: a request ends once; a second end is a bug and raises an AssertionError."""

    async def scenario() -> None:
        stream = mailbox("a")
        match end:
            case "finish":
                stream.put(Output(id="a", finish="stop"))
            case "fail":
                stream.fail("gone")
        with pytest.raises(AssertionError, match="after its end"):
            stream.put(Output(id="a", tokens=[1]))
        with pytest.raises(AssertionError, match="after its end"):
            stream.fail("gone")

    asyncio.run(scenario())


# -- the client -------------------------------------------------------------------------------


def test_a_request_goes_out_and_comes_back(tmp_path: Path) -> None:
    """Law: Submit reaches the engine as sent, its Outputs the stream, metrics the callback."""

    async def scenario() -> None:
        metrics: list[StepMetrics] = []
        client = EngineClient(on_metrics=metrics.append)
        submit = Submit("a", [1, 2], PARAMS, 3.0)
        async with connected(tmp_path, client) as (peer, events):
            await peer.send(make_ready(vocab_size=99))
            await heard(events)
            assert client.ready == make_ready(vocab_size=99)
            stream = client.submit(submit)
            assert client.inflight == 1
            assert await peer.receive() == submit
            await peer.send(Outputs([Output(id="a", tokens=[5])], StepMetrics(step=1)))
            assert await read(stream) == Output(id="a", tokens=[5])
            ending = Output(id="a", tokens=[6], finish="length")
            await peer.send(Outputs([ending], StepMetrics(step=2)))
            assert await read(stream) == ending
        assert client.inflight == 0
        assert [each.step for each in metrics] == [1, 2]

    asyncio.run(scenario())


def test_a_mode_is_sent_once_and_to_each_new_engine(tmp_path: Path) -> None:
    """Law: a mode is sent in order with requests, and to a restarted engine before all requests. If
    that engine cannot apply it, neither side reports it as active."""

    async def scenario() -> None:
        client = EngineClient()
        for life in ("first", "second"):
            (tmp_path / life).mkdir()
            async with connected(tmp_path / life, client) as (peer, events):
                await peer.send(make_ready())
                await heard(events)
                if life == "first":
                    client.set_speculation(SetSpeculation("fixed", 2))
                client.submit(Submit(life, [1], PARAMS, 3.0))
                assert await peer.receive() == SetSpeculation("fixed", 2)
                assert isinstance(await peer.receive(), Submit)
                metrics = StepMetrics(estimates=Estimates(mode="fixed", k=2))
                await peer.send(Outputs([], metrics))
                await heard(events)
                assert client.estimates == metrics.estimates
        (tmp_path / "third").mkdir()
        async with connected(tmp_path / "third", client) as (peer, events):
            await peer.send(make_ready(k_max=1))  # of another configuration
            await heard(events)
            client.submit(Submit("third", [1], PARAMS, 3.0))
            assert isinstance(await peer.receive(), Submit)
            assert client.speculation.mode == "auto"

    asyncio.run(scenario())


def test_a_swap_is_answered_once_it_is_on_trial_or_refused(tmp_path: Path) -> None:
    """Law: the end of an earlier trial is reported but no answer; a lost engine is one."""

    async def scenario() -> None:
        client = EngineClient()
        async with connected(tmp_path, client) as (peer, events):
            await peer.send(make_ready())
            await heard(events)
            task = asyncio.create_task(client.swap_draft("new"))
            assert await peer.receive() == SwapDraft("new")
            assert client.loading == "new"
            kept, trial = (Swap(name, outcome, "so", name) for name, outcome in TOLD)
            for swap in (kept, trial):
                await peer.send(Outputs([], StepMetrics(swap=swap)))
                await heard(events)
                assert client.swap == swap
            assert await task == trial
            assert client.loading == ""
            task = asyncio.create_task(client.swap_draft("newer"))
            assert await peer.receive() == SwapDraft("newer")
            client.fail_all("it died")
            with pytest.raises(EngineLost, match="it died"):
                await task
            assert client.loading == ""
            await peer.send(make_ready())
            await heard(events)
            assert client.swap is None, "the next engine has the configured draft"

    asyncio.run(scenario())


TOLD: list[tuple[str, SwapOutcome]] = [("old", "kept"), ("new", "trial")]


def test_submit_before_the_engine_has_connected_is_not_lost(tmp_path: Path) -> None:
    """Law: Ready may arrive before the command socket, which connects separately, is up."""

    async def scenario() -> None:
        client = EngineClient()
        endpoints = f"ipc://{tmp_path}/c", f"ipc://{tmp_path}/e"
        client.connect(*endpoints, on_event=lambda event: None)
        client.state = "ready"
        client.submit(Submit("a", [1], PARAMS, 0.0))
        client.submit(Submit("b", [1], PARAMS, 0.0))
        peer = Peer(*endpoints)
        first, second = await peer.receive(), await peer.receive()
        assert isinstance(first, Submit)
        assert isinstance(second, Submit)
        assert (first.id, second.id) == ("a", "b")
        peer.close()
        client.disconnect()

    asyncio.run(scenario())


def test_abort_ends_the_stream_at_once_and_tells_the_engine(tmp_path: Path) -> None:
    """Law: the stream ends without waiting; later outputs of the engine for it are dropped."""

    async def scenario() -> None:
        client = EngineClient()
        async with connected(tmp_path, client) as (peer, events):
            stream = client.submit(Submit("a", [1], PARAMS, 0.0))
            client.abort(["a", "never-seen"])
            client.abort(["a"])
            assert client.inflight == 0
            assert (await read(stream)).finish == "abort"
            assert isinstance(await peer.receive(), Submit)
            assert await peer.receive() == Abort(["a"])
            late = [Output(id="a", tokens=[1]), Output(id="a", finish="abort")]
            await peer.send(Outputs(late, StepMetrics()))
            assert isinstance(await heard(events), Outputs)

    asyncio.run(scenario())


@pytest.mark.parametrize("state", ["starting", "draining", "lost", "failed", "stopped"])
def test_nothing_is_submitted_unless_ready(state: str) -> None:
    """Law: in every other state `submit` raises EngineLost with a sentence for the client."""
    client = EngineClient()
    client.state = state  # type: ignore[assignment]
    with pytest.raises(EngineLost, match="engine|server"):
        client.submit(Submit("a", [1], PARAMS, 0.0))
    assert client.inflight == 0


def test_fail_all_ends_every_stream_once(tmp_path: Path) -> None:
    """Law: each open stream raises EngineLost; one that has ended is not changed."""

    async def scenario() -> None:
        client = EngineClient()
        async with connected(tmp_path, client) as (peer, events):
            streams = [client.submit(Submit(id, [1], PARAMS, 0.0)) for id in "abc"]
            await peer.send(Outputs([Output(id="b", finish="stop")], StepMetrics()))
            await heard(events)
            client.fail_all("it is gone")
            client.fail_all("it is gone again")
            assert client.inflight == 0
            assert (await read(streams[1])).finish == "stop"
            for stream in (streams[0], streams[2]):
                with pytest.raises(EngineLost, match="it is gone$"):
                    await read(stream)

    asyncio.run(scenario())


def test_a_message_that_does_not_decode_is_fatal(tmp_path: Path) -> None:
    """Law: an invalid message from the engine reaches the supervisor as Fatal, always."""

    async def scenario() -> Event:
        client = EngineClient()
        async with connected(tmp_path, client) as (peer, events):
            await peer.send_bytes(b"\xc1")
            return await heard(events)

    event = asyncio.run(scenario())
    assert isinstance(event, Fatal)
    assert "could not be processed" in event.message


def test_an_endpoint_that_cannot_be_bound_is_an_os_error(tmp_path: Path) -> None:
    """Law: zmq's errors stay in the client; the supervisor makes a sentence of an OSError."""

    async def scenario() -> None:
        client = EngineClient()
        for first in ("no/such/folder/c", "c"):  # whichever of the two it is
            second = "e" if "folder" in first else "no/such/folder/e"
            endpoints = (f"ipc://{tmp_path}/{first}", f"ipc://{tmp_path}/{second}")
            with pytest.raises(OSError, match="cannot bind"):
                client.connect(*endpoints, on_event=lambda event: None)
            client.disconnect()

    asyncio.run(scenario())


def test_more_events_than_one_read_takes(tmp_path: Path) -> None:
    """Law: the descriptor signals new events only once, so all of them are read, a few at a time,
    with turns of other tasks in between."""

    async def scenario() -> None:
        client, count = EngineClient(), 10 * EVENTS_AT_ONCE
        async with connected(tmp_path, client) as (peer, events):
            stream = client.submit(Submit("a", [1], PARAMS, 3.0))
            for step in range(count):
                finish: FinishReason | None = "length" if step == count - 1 else None
                await peer.send(
                    Outputs([Output(id="a", tokens=[step], finish=finish)], StepMetrics())
                )
            tokens: list[int] = []
            while len(tokens) < count:
                tokens += (await asyncio.wait_for(read(stream), 10)).tokens
            assert tokens == list(range(count))
            assert client.inflight == 0
            assert events.qsize() == count

    asyncio.run(scenario())


def test_one_event_wakes_the_reader_of_many_streams() -> None:
    """Law: the reader misses no output, nor a failure that follows the last tokens."""

    async def scenario() -> None:
        streams, wake = [mailbox("a"), mailbox("b")], asyncio.Event()
        for stream in streams:
            stream.wake = wake
        streams[0].put(Output(id="a", tokens=[1]))
        assert wake.is_set()
        wake.clear()
        assert take(streams[0]).tokens == [1]
        streams[1].put(Output(id="b", tokens=[2]))
        streams[1].fail("lost")
        assert wake.is_set()
        wake.clear()
        assert take(streams[1]).tokens == [2]
        assert wake.is_set()
        with pytest.raises(EngineLost, match="lost"):
            take(streams[1])

    asyncio.run(scenario())


def test_first_tokens_are_handed_out_first(tmp_path: Path) -> None:
    """Law: outputs that start a reply are delivered first; the others keep their order."""

    async def note(stream: Stream, order: list[str]) -> None:
        order.append((await read(stream)).id)

    async def scenario() -> None:
        client, order = EngineClient(), list[str]()
        async with connected(tmp_path, client) as (peer, _):
            streams = [client.submit(Submit(id, [1], PARAMS, 3.0)) for id in "abc"]
            readers = [asyncio.create_task(note(stream, order)) for stream in streams]
            await asyncio.sleep(0)
            items = [Output(id="a"), Output(id="b", cached_tokens=0), Output(id="c")]
            await peer.send(Outputs(items, StepMetrics()))
            await asyncio.wait_for(asyncio.gather(*readers), 10)
        assert order == ["b", "a", "c"]

    asyncio.run(scenario())
