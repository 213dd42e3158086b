"""Generation and Choice without HTTP: fan-out, text, counts, logprobs, one end per sequence."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

from engine.errors import EngineLost
from engine.messages import SamplingParams, Submit
from server.engine.admission import Admission
from server.engine.mailbox import Stream
from server.errors import GenerationFailed, NotReady, QueueFull
from server.generation.annotations import token_text
from server.generation.choice import Delta
from server.generation.generation import Generation
from server.generation.generation_spec import Echo, GenerationSpec, choice_seed
from server.generation.usage import Usage
from server.observe.metrics import Metrics
from tests.support import timeless
from tests.support.byte_tokenizer import EOS, ByteTokenizer
from tests.support.fake_client import FakeClient, Script, listed_script, make_ready

T = TypeVar("T")
END = 257  # the fake engine's EOS id


def fake(script: Script | bytes | None = None, **settings: Any) -> FakeClient:
    if isinstance(script, bytes):
        script = listed_script(list(script), then=END)
    return FakeClient(script=script, **settings)


def spec(**changes: Any) -> GenerationSpec:
    params = {"seed": 1, "max_tokens": 100, **changes.pop("params", {})}
    base: dict[str, Any] = {"id": "x", "prompts": [[104, 105]], "context": 512}
    return GenerationSpec(**{**base, **changes}, params=SamplingParams(**params))


class Asked:
    """A spec that `collect` submits in an event loop; then there is the generation."""

    generation: Generation

    def __init__(self, client: FakeClient, metrics: Metrics | None = None, **changes: Any) -> None:
        self._spec = spec(**changes)
        self._client = client
        self._metrics = metrics if metrics is not None else Metrics()

    def begin(self) -> Generation:
        self.generation = Generation(
            self._spec,
            self._spec.submit(self._client, arrival=0.0),
            client=self._client,
            tokenizer=ByteTokenizer(),
            metrics=self._metrics,
        )
        return self.generation

    @property
    def usage(self) -> Usage:
        return self.generation.usage


def run(main: Callable[[], Awaitable[T]]) -> T:
    async def inner() -> T:
        return await main()

    return timeless.run(inner())


async def collect(asked: Asked) -> list[Delta]:
    generation, deltas = asked.begin(), list[Delta]()
    try:
        while not generation.finished:
            deltas += await generation.read()
    finally:
        generation.close()
    return deltas


def text_of(deltas: list[Delta], index: int = 0) -> str:
    return "".join(delta.text for delta in deltas if delta.index == index)


@pytest.mark.parametrize("step", [1, 2, 3, 7])
@pytest.mark.parametrize("n", [1, 4])
def test_text_does_not_depend_on_tokens_per_step(step: int, n: int) -> None:
    """Law: texts and counts are the same for any tokens per step, with one finish per choice."""

    def outcome(step: int) -> tuple[list[str], int]:
        call = Asked(fake(tokens_per_step=step), n=n, params={"max_tokens": 10})
        deltas = run(lambda: collect(call))
        finishes = [delta.index for delta in deltas if delta.finish is not None]
        assert sorted(finishes) == list(range(n))
        return [text_of(deltas, i) for i in range(n)], call.usage.completion_tokens

    assert outcome(step) == outcome(1)


def test_seeds_of_choices() -> None:
    """Law: choice 0 has the seed itself, others derived seeds, which are equal for all prompts."""
    client = fake()
    call = Asked(client, prompts=[[1], [2]], n=3, params={"seed": 7})
    run(lambda: collect(call))
    seeds = [submit.params.seed for submit in client.submitted]
    assert seeds[:3] == seeds[3:] == [choice_seed(7, i) for i in range(3)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 3
    # SplitMix64's published outputs for the state 1234567 (Vigna's splitmix64.c)
    assert choice_seed(1234567, 1) == 6457827717110365317
    assert choice_seed(1234567, 2) == 3203168211198807973


def test_characters_are_never_split() -> None:
    """Law: with one byte per step, every delta is still whole characters."""
    call = Asked(fake("añ🙂e".encode()))
    deltas = run(lambda: collect(call))
    assert [delta.text for delta in deltas if delta.text] == ["a", "ñ", "🙂", "e"]


def test_an_unfinished_character_at_the_end() -> None:
    """Law: if max_tokens cuts a character, the text ends with U+FFFD, and nothing fails."""
    call = Asked(fake("a🙂".encode()), params={"max_tokens": 3})
    assert text_of(run(lambda: collect(call))) == "a\ufffd"


@pytest.mark.parametrize("step", [1, 5, 50])
def test_a_stop_string_aborts_and_counts_to_the_match(step: int) -> None:
    """Law: text ends before the match, tokens count up to it, the request is aborted at once."""
    client = fake(b"ab<END>more text", tokens_per_step=step)
    call = Asked(client, stop=("<END>", "zzz"), params={"ignore_eos": True})
    deltas = run(lambda: collect(call))
    assert text_of(deltas) == "ab"
    assert deltas[-1].finish == "stop"
    assert call.usage.completion_tokens == len(b"ab<END>")
    assert client.aborted == ["x-0"]
    assert client.inflight == 0


def test_a_stop_string_may_be_kept() -> None:
    """Law: include_stop keeps the match and nothing after it."""
    call = Asked(fake(b"ab<END>more", tokens_per_step=4), stop=("<END>",), include_stop=True)
    assert text_of(run(lambda: collect(call))) == "ab<END>"


def test_an_incomplete_stop_string_belongs_to_the_text() -> None:
    """Law: an incomplete stop string at the very end belongs to the text."""
    call = Asked(fake(b"ab<EN"), stop=("<END>",))
    deltas = run(lambda: collect(call))
    assert text_of(deltas) == "ab<EN"
    assert deltas[-1].finish == "stop"  # by EOS


def test_no_stop_string_before_min_tokens() -> None:
    """Law: min_tokens applies to stop strings as to stop tokens."""
    call = Asked(fake(b"xxoxxoxx"), stop=("o",), params={"min_tokens": 4})
    assert text_of(run(lambda: collect(call))) == "xxoxx"


def test_a_stop_string_and_the_limit_in_one_step() -> None:
    """Law: the match wins over "length", and there is nothing to abort."""
    client = fake(b"abSTOP", tokens_per_step=6)
    call = Asked(client, stop=("STOP",), params={"max_tokens": 6})
    deltas = run(lambda: collect(call))
    assert deltas[-1].finish == "stop"
    assert client.aborted == []


def test_the_stop_token_has_no_text_but_counts() -> None:
    """Law: a token of stop_token_ids that is an ordinary letter is not in the text."""
    call = Asked(fake(b"abc"), params={"stop_token_ids": (99,)})
    assert text_of(run(lambda: collect(call))) == "ab"
    assert call.usage.completion_tokens == 3
    kept = Asked(fake(b"abc"), include_stop=True, params={"stop_token_ids": (99,)})
    assert text_of(run(lambda: collect(kept))) == "abc"


@pytest.mark.parametrize("step", [1, 3, 9])
def test_logprobs_belong_to_the_text_that_was_sent(step: int) -> None:
    """Law: entries of tokens that a stop string cut off are never sent, streamed or not."""
    client = fake(b"abcSTOPxyz", tokens_per_step=step)
    call = Asked(client, stop=("STOP",), params={"logprobs": 1})
    deltas = run(lambda: collect(call))
    entries = [entry for delta in deltas for entry in delta.logprobs or []]
    assert "".join(entry.text(entry.token) for entry in entries) == text_of(deltas) == "abc"
    assert [entry.offset for entry in entries] == [0, 1, 2]
    assert [len(entry.top) for entry in entries] == [1, 1, 1]


def test_logprobs_of_a_held_back_end_come_at_the_end() -> None:
    """Law: logprobs are held back and released with their text."""
    call = Asked(fake(b"abST"), stop=("STOP",), params={"logprobs": 0})
    deltas = run(lambda: collect(call))
    entries = [entry for delta in deltas for entry in delta.logprobs or []]
    assert "".join(entry.text(entry.token) for entry in entries) == "abST"


def test_logprobs_of_split_characters() -> None:
    """Law: a token that is part of a character is named by its bytes, at the character's offset."""
    call = Asked(fake("añb".encode()), params={"logprobs": 0})
    deltas = run(lambda: collect(call))
    entries = [entry for delta in deltas for entry in delta.logprobs or []]
    assert [e.text(e.token) for e in entries] == ["a", "bytes:\\xc3", "bytes:\\xb1", "b"]
    assert [e.offset for e in entries] == [0, 1, 1, 2]
    assert token_text("ñ".encode()) == "ñ"


def test_echo_comes_first_and_once() -> None:
    """Law: each choice starts with its prompt; with prompt logprobs, the first token has none."""
    call = Asked(
        fake(b"xyz", tokens_per_step=2),
        echoes=[Echo("hi", [104, 105], 1)],
        n=2,
        params={"logprobs": 0, "prompt_logprobs": 0},
    )
    deltas = run(lambda: collect(call))
    assert text_of(deltas, 0) == text_of(deltas, 1) == "hixyz"
    entries = [e for delta in deltas if delta.index == 0 for e in delta.logprobs or []]
    assert [e.text(e.token) for e in entries] == list("hixyz")
    assert [e.logprob is None for e in entries] == [True, False, False, False, False]
    assert [e.offset for e in entries] == [0, 1, 2, 3, 4]


def test_special_tokens_in_the_text() -> None:
    """Law: they are skipped or shown, as requested."""
    ready = make_ready(vocab_size=260)
    script = listed_script([97, EOS, 98], then=END)
    for skip, expected in ((True, "ab"), (False, "a<|endoftext|>b")):
        call = Asked(fake(script, ready=ready), skip_special_tokens=skip)
        assert text_of(run(lambda call=call: collect(call))) == expected  # type: ignore[misc]


def test_max_tokens_is_clipped_to_the_context() -> None:
    """Law: each prompt's limit is what the context leaves."""
    client = fake()
    call = Asked(
        client, prompts=[[1] * 10, [2] * 15], context=16, params={"max_tokens": 99, "min_tokens": 4}
    )
    run(lambda: collect(call))
    assert [submit.params.max_tokens for submit in client.submitted] == [6, 1]
    assert [submit.params.min_tokens for submit in client.submitted] == [4, 1]


def test_usage_counts_a_prompt_once_and_choices_each() -> None:
    """Law: prompt_tokens with n=3 are those with n=1; speculation is summed over choices."""
    call = Asked(fake(tokens_per_step=3), prompts=[[1, 2], [3]], n=3, params={"max_tokens": 6})
    run(lambda: collect(call))
    usage = call.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (3, 36)
    assert (usage.proposed, usage.accepted, usage.rounds) == (24, 24, 12)
    assert usage.by_proposer == {"draft_model": (24, 24)}


@pytest.mark.parametrize("steps_ahead", [1, 2, 9])
def test_draft_tokens_after_a_stop_string_are_not_counted(steps_ahead: int) -> None:
    """Law: the counts end with the step that completes the stop string, however far the engine ran
    before the abort; of that step's accepted draft tokens, those within the completion count."""
    client = fake(listed_script(list(b"abcdefghijkl"), then=EOS), tokens_per_step=3)
    gate = client._gate = asyncio.Semaphore(0)
    call = Asked(
        client, stop=("d",), params={"max_tokens": 12, "prediction": tuple(b"abcdefghijkl")}
    )

    async def main() -> str:
        task = asyncio.create_task(collect(call))
        while not task.done():
            for _ in range(steps_ahead):
                gate.release()
            before = client.steps
            while not task.done() and client.inflight and client.steps < before + steps_ahead:
                await asyncio.sleep(0)
            for _ in range(9):
                await asyncio.sleep(0)
        return text_of(await task)

    assert run(main) == "abc"
    usage = call.usage
    assert (usage.completion_tokens, usage.rounds) == (4, 2)
    assert (usage.proposed, usage.accepted) == (4, 3)
    assert usage.by_proposer == {"prediction": (4, 3)}
    assert (usage.predicted, usage.mispredicted) == (3, 1)


def test_closing_aborts_open_choices() -> None:
    """Law: `close` in the middle aborts all choices, none of them twice."""
    client = fake()
    metrics = Metrics()
    call = Asked(client, metrics, n=3)

    async def main() -> None:
        generation = call.begin()
        await generation.read()
        generation.close()
        generation.close()

    run(main)
    assert sorted(client.aborted) == ["x-0", "x-1", "x-2"]
    assert client.inflight == 0
    assert b'requests_total{reason="abort"} 1.0' in metrics.render()


@pytest.mark.parametrize("n", [1, 3])
def test_cancellation_aborts(n: int) -> None:
    """Law: a cancelled task (the client disconnected) aborts without awaiting anything."""
    client = fake(gate=asyncio.Semaphore(0))
    call = Asked(client, n=n)

    async def main() -> None:
        task = asyncio.create_task(collect(call))
        while client.inflight < n:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert client.inflight == 0

    run(main)
    assert len(client.aborted) == n


@pytest.mark.parametrize("taken", [0, 1, 2])
def test_a_refused_call_is_no_ended_request(taken: int) -> None:
    """Bug: if the engine was lost between two choices, the call was counted twice, as refused and
    as failed."""
    client, metrics = fake(), Metrics()
    accept = client.submit

    def refuse_later(submit: Submit) -> Stream:
        if len(client.submitted) == taken:
            raise NotReady("the engine is restarting")
        return accept(submit)

    client.submit = refuse_later  # type: ignore[method-assign]
    with pytest.raises(NotReady):
        run(lambda: collect(Asked(client, metrics, n=3)))
    assert client.inflight == 0
    assert len(client.aborted) == taken
    assert b'requests_total{reason="error"} 0.0' in metrics.render()


@pytest.mark.parametrize("n", [1, 3])
def test_engine_death_ends_the_call(n: int) -> None:
    """Law: EngineLost has the reason, it counts as an error, and no stray task raises."""
    client = fake(gate=asyncio.Semaphore(0))
    metrics = Metrics()
    call = Asked(client, metrics, n=n)
    strays: list[dict[str, Any]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: strays.append(context))
        task = asyncio.create_task(collect(call))
        while client.inflight < n:
            await asyncio.sleep(0)
        client.die("gone")
        with pytest.raises(EngineLost, match="gone"):
            await task

    run(main)
    assert strays == []
    assert b'requests_total{reason="error"} 1.0' in metrics.render()


def test_one_refused_choice_ends_all() -> None:
    """Law: finish "error" raises GenerationFailed with the engine's sentence."""
    client = fake(refusal="not finite")
    call = Asked(client, n=2)
    with pytest.raises(GenerationFailed, match="not finite"):
        run(lambda: collect(call))
    assert client.inflight == 0


def test_submitting_is_all_or_nothing() -> None:
    """Law: if the engine is lost between two choices, the first is aborted."""

    class Flaky(FakeClient):
        def submit(self, submit: Any) -> Any:
            if len(self.submitted) == 1:
                self.state = "lost"
            return super().submit(submit)

    client, metrics = Flaky(), Metrics()
    call = Asked(client, metrics, n=3)
    with pytest.raises(EngineLost):
        run(lambda: collect(call))
    assert client.aborted == ["x-0"]
    assert 'foredraft_requests_total{reason="error"} 1.0' in metrics.render().decode()


@pytest.mark.parametrize("submitted", [True, False])
def test_a_bug_while_submitting_leaves_nothing_behind(submitted: bool) -> None:
    """Bug to avoid: only errors of the engine ended what had been submitted, so after any other
    the engine went on for nobody, and admission had less room for good."""

    class Broken(FakeClient):
        def submit(self, submit: Any) -> Any:
            if len(self.submitted) == 1 and not submitted:
                raise RuntimeError("a bug")
            return super().submit(submit)

    class Undecodable(ByteTokenizer):
        def token_bytes(self, id: int) -> bytes:
            raise RuntimeError("a bug")

    async def main() -> None:
        client, metrics = Broken(), Metrics()
        tokenizer = Undecodable() if submitted else ByteTokenizer()
        resumed = spec(begun=[104]) if submitted else spec(n=2)
        streams = resumed.submit(client, arrival=0.0)
        with pytest.raises(RuntimeError, match="a bug"):
            Generation(resumed, streams, client=client, tokenizer=tokenizer, metrics=metrics)
        assert client.aborted == ["x-0"]
        assert client.inflight == 0
        assert 'foredraft_requests_total{reason="error"} 1.0' in metrics.render().decode()

    run(main)


def test_a_bug_at_the_deadline_ends_the_call() -> None:
    """Bug: an error of no known kind, met when the deadline took what had arrived, was kept from
    the reader, who waited for ever."""

    class Undecodable(ByteTokenizer):
        def token_bytes(self, id: int) -> bytes:
            raise RuntimeError("a bug")

    async def main() -> None:
        client = FakeClient()
        asked = spec(seconds=0.05)
        streams = asked.submit(client, arrival=0.0)
        generation = Generation(
            asked, streams, client=client, tokenizer=Undecodable(), metrics=Metrics()
        )
        await asyncio.sleep(0.2)  # reads nothing before the deadline
        with pytest.raises(RuntimeError, match="a bug"):
            await asyncio.wait_for(generation.read(), 5)
        generation.close()
        assert client.inflight == 0

    run(main)


def test_metrics_of_a_finished_call() -> None:
    """Law: one request, one TTFT, and one ITL per later token are recorded."""
    metrics = Metrics()
    call = Asked(fake(), metrics, n=2, params={"max_tokens": 5})
    run(lambda: collect(call))
    call.generation.close()
    text = metrics.render().decode()
    assert 'foredraft_requests_total{reason="length"} 1.0' in text
    assert "foredraft_time_to_first_token_seconds_count 1.0" in text
    assert "foredraft_inter_token_latency_seconds_count 8.0" in text
    assert "foredraft_prompt_tokens_total 2.0" in text


def test_admission_counts_requests_being_tokenised() -> None:
    """Bug: two requests could both pass the check while their prompts were tokenised."""
    admission = Admission(FakeClient(), 4)
    with admission.reserve(3):
        with pytest.raises(QueueFull, match="at most 4"), admission.reserve(2):
            pass
        with admission.reserve(1):
            pass
    with admission.reserve(4):
        pass
