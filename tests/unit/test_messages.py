"""The wire format: every message survives the round trip, and anything else is refused."""

from __future__ import annotations

import msgspec
import pytest

from engine.messages import (
    RANGES,
    Abort,
    Command,
    Drain,
    Draining,
    Event,
    Fatal,
    Grammar,
    Output,
    Outputs,
    Ready,
    SamplingParams,
    StepMetrics,
    StepSeconds,
    Stop,
    Submit,
    Swap,
    SwapDraft,
    TokenLogprobs,
)

FULL_PARAMS = SamplingParams(
    seed=2**64 - 1,
    max_tokens=17,
    temperature=0.7,
    top_p=0.9,
    top_k=40,
    min_p=0.05,
    min_tokens=3,
    stop_token_ids=(5, 6),
    ignore_eos=True,
    presence_penalty=-2.0,
    frequency_penalty=2.0,
    repetition_penalty=1.1,
    logit_bias={0: -100.0, 257: 3.5},
    logprobs=20,
    prompt_logprobs=0,
    cache_salt="tenant",
    grammar=Grammar("json_schema", '{"type": "object"}'),
)
COMMANDS: list[Command] = [
    Submit("a-0", [0, 1, 257], SamplingParams(seed=0, max_tokens=1), 1.5),
    Submit("a-1", [], FULL_PARAMS, 0.0),
    Abort(["a-0", "a-1"]),
    Drain(),
    Stop(),
    SwapDraft("org/name"),
]
LOGPROBS = TokenLogprobs(token=3, logprob=-0.25, top=[(3, -0.25), (4, -2.0)])
EVENTS: list[Event] = [
    Ready(
        pid=7,
        target="demo",
        max_model_len=512,
        vocab_size=258,
        eos_ids=[257],
        num_blocks=64,
        block_size=16,
        dtype="float32",
        device="cpu",
        attention="sdpa",
        proposer="none",
        controller="fixed",
        k_max=0,
    ),
    Outputs([], StepMetrics()),
    Outputs([], StepMetrics(swap=Swap("org/name", "refused", "it is too large", "demo"))),
    Outputs(
        [
            Output(id="a-0", tokens=[1, 2], cached_tokens=16, rounds=1, proposed=4, accepted=1),
            Output(
                id="a-1",
                tokens=[3],
                logprobs=[LOGPROBS],
                prompt_logprobs=[None, LOGPROBS],
                finish="stop",
                stop_token=3,
            ),
            Output(id="a-2", finish="error", error="no such thing"),
        ],
        StepMetrics(step=3, seconds=StepSeconds(verify=0.5), accepted_at=[2, 1], k_counts=[0, 1]),
    ),
    Fatal("the engine failed"),
    Draining(),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: type(command).__name__)
def test_a_command_survives_the_trip(command: Command) -> None:
    """Law: the engine decodes what the front end encodes, field by field."""
    data = msgspec.msgpack.encode(command)
    assert msgspec.msgpack.decode(data, type=Command) == command


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_an_event_survives_the_trip(event: Event) -> None:
    """Law: the front end decodes what the engine encodes, field by field."""
    data = msgspec.msgpack.encode(event)
    assert msgspec.msgpack.decode(data, type=Event) == event


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"\xc1",
        b"GET / HTTP/1.1",
        msgspec.msgpack.encode({"type": "Reboot"}),
        msgspec.msgpack.encode({"type": "Abort", "ids": "a-0"}),
        msgspec.msgpack.encode({"type": "Abort"}),
        msgspec.msgpack.encode(COMMANDS[0])[:-1],
        msgspec.msgpack.encode(EVENTS[0]),
    ],
)
def test_garbage_is_refused(garbage: bytes) -> None:
    """Law: a message that is not a command fails to decode."""
    with pytest.raises(msgspec.DecodeError):
        msgspec.msgpack.decode(garbage, type=Command)


def test_every_number_that_a_request_sets_has_a_range() -> None:
    """Law: the engine checks each number of SamplingParams; `min_tokens` against `max_tokens`."""
    params = msgspec.structs.asdict(FULL_PARAMS)
    numbers = {name for name, value in params.items() if type(value) in (int, float)}
    assert RANGES.keys() | {"min_tokens"} == numbers
    assert all(low <= params[name] <= high for name, (low, high) in RANGES.items())


def test_an_output_costs_little() -> None:
    """Law: defaults are not encoded, so the usual Output of one token is small."""
    assert len(msgspec.msgpack.encode(Output(id="a-0", tokens=[1], rounds=1))) < 32
