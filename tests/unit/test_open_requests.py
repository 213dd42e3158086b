"""Requests that outlive engines; an engine here is a list of commands."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from engine.errors import EngineLost
from engine.messages import (
    Abort,
    Command,
    Output,
    ResumedReply,
    SamplingParams,
    Speculation,
    Submit,
)
from server.engine.mailbox import Stream
from server.engine.open_requests import OpenRequests, ResumeOutcome
from tests.support import timeless
from tests.support.fake_client import make_ready
from tests.support.streams import take

PARAMS = SamplingParams(seed=1, max_tokens=10)
READY = make_ready()
KILLED = "the engine process was killed by SIGKILL"


class World:
    """Open requests, the commands sent to the current engine, and the outcomes of held requests."""

    def __init__(self, seconds: float = 60.0) -> None:
        self.commands: list[Command] = []
        self.held: list[tuple[str, float]] = []
        self.requests = OpenRequests(self.commands.append, seconds=seconds, on_held=self._note)

    def _note(self, outcome: ResumeOutcome, seconds: float) -> None:
        self.held.append((outcome, seconds))

    @property
    def outcomes(self) -> list[str]:
        return [outcome for outcome, _ in self.held]

    def add(self, *ids: str) -> list[Stream]:
        return [self.requests.add(Submit(id, [1, 2], PARAMS, 0.0)) for id in ids]

    def taken(self) -> list[str]:
        """Return the ids of the requests submitted to the engine since the last call."""
        submits = [one.id for one in self.commands if isinstance(one, Submit)]
        self.commands.clear()
        return submits

    def say(self, id: str, *tokens: int, **fields: Any) -> None:
        self.requests.deliver([Output(id=id, tokens=list(tokens), **fields)])

    def lose(self, *, planned: bool = False) -> int:
        return self.requests.hold(KILLED, planned=planned)

    def die_and_return(self) -> list[str]:
        self.lose()
        self.commands.clear()
        self.requests.resume_on(READY)
        return self.taken()


def in_a_loop(
    scenario: Callable[[], Coroutine[Any, Any, None]],
) -> Callable[[], None]:
    def test() -> None:
        timeless.run(scenario())

    test.__name__, test.__doc__ = scenario.__name__, scenario.__doc__
    return test


@in_a_loop
async def test_the_next_engine_gets_the_tokens_so_far() -> None:
    """Law: tokens arrive once and in order, counts continue, and there is one end; unread outputs
    are merged across the loss."""
    world = World()
    (stream,) = world.add("a")
    world.say("a", 5, 6, rounds=1, proposed=4, accepted=1, predicted=2, cached_tokens=0)
    world.say("a", 7, rounds=2, proposed=8, accepted=1, predicted=2)
    world.lose()
    world.commands.clear()
    world.requests.resume_on(READY)
    (again,) = world.commands
    assert isinstance(again, Submit)
    assert again.prompt == [1, 2]
    assert again.begun == ResumedReply([5, 6, 7], rounds=2, proposed=8, accepted=1, predicted=2)
    world.say("a", 8, rounds=3, finish="length")
    output = take(stream)
    assert (output.tokens, output.rounds, output.finish) == ([5, 6, 7, 8], 3, "length")
    assert output.cached_tokens == 0
    assert world.outcomes == ["resumed"]
    assert len(world.requests) == 0


@in_a_loop
async def test_a_request_without_output_is_resubmitted_unchanged() -> None:
    """Law: a request without any output yet is submitted again unchanged."""
    world = World()
    world.add("a")
    (first,) = world.commands
    world.lose()
    world.requests.resume_on(READY)
    assert world.commands[-1] == first


@in_a_loop
async def test_a_reply_is_not_cut_short_by_a_smaller_engine() -> None:
    """Bug: an engine with fewer blocks ended the reply early, as if at its maximum length. Law: a
    request that may not fit ends with an error; the others continue."""
    world = World()
    long, short = world.requests.add(Submit("long", [1] * 90, PARAMS, 0.0)), *world.add("short")
    world.say("long", 5)
    world.lose(planned=True)
    world.taken()
    world.requests.resume_on(make_ready(max_model_len=99))
    assert world.taken() == ["short"]
    assert take(long).tokens == [5]
    with pytest.raises(EngineLost, match="may take 100 tokens, the engine now takes 99"):
        take(long)
    world.say("short", 6, finish="stop")
    assert take(short).finish == "stop"
    assert world.outcomes == ["given_up", "resumed"]


@in_a_loop
async def test_of_two_losses_the_first_begins_the_gap() -> None:
    """Law: several losses in a row are one gap, and a loss of an engine that never got a request
    does not count against it."""
    world = World()
    world.add("a", "b")
    world.say("a", 5)
    world.say("b", 5)
    world.lose()
    world.lose()  # while the next engine starts
    world.requests.resume_on(READY)
    assert world.taken()[-2:] == ["a", "b"]
    world.say("a", 6)
    world.say("a", 7)
    assert world.outcomes == ["resumed"]


@in_a_loop
async def test_a_suspect_is_tried_alone_and_an_innocent_one_is_not_blamed() -> None:
    """Law: after two losses without output in between, requests go to the engine one at a time and
    new ones wait. Only the request that was alone at two losses ends, with an error."""
    world = World()
    good, bad = world.add("good", "bad")
    world.say("good", 5)
    world.taken()
    assert sorted(world.die_and_return()) == ["bad", "good"]
    assert world.die_and_return() == ["bad"]  # it never had any output, so it is the prime suspect
    world.add("new")
    assert world.taken() == []
    assert world.die_and_return() == ["bad"]  # alone for the first time: this may be chance
    assert world.lose() == 3  # losses before this one
    assert take(good).finish is None
    end = take(bad)
    assert end.finish == "error"
    assert end.error is not None
    assert "4 times in a row" in end.error
    assert "SIGKILL" in end.error
    assert world.outcomes == ["given_up"]
    world.requests.resume_on(READY)
    assert world.taken() == ["good"]  # it also died twice without output
    world.say("good", 6)
    assert world.taken() == ["new"]
    assert world.outcomes == ["given_up", "resumed"]


@in_a_loop
async def test_progress_clears_a_request_of_suspicion() -> None:
    """Law: a request that got a token between losses is no suspect, even if alone ten times."""
    world = World()
    (stream,) = world.add("a")
    for token in range(10):
        world.say("a", token)
        assert world.die_and_return()[-1] == "a"
    world.say("a", 10, finish="length")
    assert take(stream).tokens == [*range(11)]


@in_a_loop
async def test_a_planned_end_blames_no_request() -> None:
    """Law: an operator may replace the engine any number of times."""
    world = World()
    world.add("a")
    for _ in range(5):
        assert world.lose(planned=True) == 0
        world.requests.resume_on(READY)
    assert world.taken() == ["a"] * 6
    assert world.outcomes == []


@pytest.mark.parametrize("seed", range(40))
def test_requests_that_kill_the_engine_are_found(seed: int) -> None:
    """Law: in any order, each request that kills the engine at one of its tokens ends with an
    error, every other request completes, and losses are few, even if the last outputs are lost and
    new requests arrive at any time."""

    async def scenario() -> None:
        chance, world = random.Random(seed), World()
        length = 12
        names = [f"r{i}" for i in range(chance.randint(1, 12))]
        fatal = {name: chance.randrange(length) for name in names[: chance.randint(1, 2)]}
        chance.shuffle(names)
        streams = dict(zip(names, world.add(*names), strict=True))
        losses, arrived = 0, dict.fromkeys(names, 0)
        running: dict[str, int] = {}
        while len(world.requests):
            for command in world.commands:
                if isinstance(command, Submit):
                    running[command.id] = len(command.begun.tokens)
            world.commands.clear()
            if any(fatal.get(name) == at for name, at in running.items()):
                losses += 1
                world.lose()
                running.clear()
                world.commands.clear()
                world.requests.resume_on(READY)
                continue
            if len(streams) < 15 and chance.random() < 0.1:
                name = f"new{len(streams)}"
                streams[name], arrived[name] = world.add(name)[0], 0
            for name in list(running):
                running[name] += 1
                arrived[name] += 1
                finish = {"finish": "length"} if running[name] == length else {}
                world.say(name, running[name], **finish)
                if finish:
                    del running[name]
        assert losses <= 5 * len(fatal)
        for name, stream in streams.items():
            ends = take(stream)
            assert ends.tokens == [*range(1, 1 + arrived[name])]
            assert ends.finish == ("error" if name in fatal else "length")

    asyncio.run(scenario())


@in_a_loop
async def test_no_request_is_held_forever() -> None:
    """Law: after `seconds` a held stream delivers what has arrived, then ends with an error; a
    stream that has resumed does not."""
    world = World(seconds=0.05)
    late, continuing = world.add("late", "goes on")
    world.say("late", 5)
    world.lose()
    world.requests.resume_on(READY)
    world.say("goes on", 6)
    await asyncio.sleep(0.1)
    assert take(late).tokens == [5]
    with pytest.raises(EngineLost, match=r"could not be resumed within 0\.05 s"):
        take(late)
    assert world.outcomes == ["resumed", "too_late"]
    assert all(0 <= seconds < 5 for _, seconds in world.held)
    assert Abort(["late"]) in world.commands
    world.say("late", 9)  # this output crosses the abort
    world.say("goes on", 7, finish="length")
    assert take(continuing).tokens == [6, 7]


@in_a_loop
async def test_a_request_behind_a_suspect_is_not_held_forever_either() -> None:
    """Bug: a request that arrived while a suspect was tried alone waited without bound after that
    engine was lost, and was not counted."""
    world = World(seconds=0.05)
    world.add("poison", "beside")
    world.die_and_return()
    world.die_and_return()
    (stream,) = world.add("behind")
    world.lose()
    await asyncio.sleep(0.2)
    with pytest.raises(EngineLost, match=r"could not be resumed within 0\.05 s"):
        take(stream)
    assert world.outcomes == ["too_late"] * 3
    assert len(world.requests) == 0


@in_a_loop
async def test_with_zero_seconds_no_request_is_held() -> None:
    """Law: 0 turns holding off, and a loss ends the running requests."""
    world = World(seconds=0.0)
    (stream,) = world.add("a")
    world.lose()
    with pytest.raises(EngineLost, match="SIGKILL"):
        take(stream)
    assert world.held == []
    assert len(world.requests) == 0


@pytest.mark.parametrize("how", ["client left", "server drains"])
def test_the_rest_does_not_wait_for_a_suspect_that_is_gone(how: str) -> None:
    """Law: when the client of the suspect leaves, or the engine is about to drain, the other
    requests are submitted."""

    async def scenario() -> None:
        world = World()
        world.add("a", "b", "c")
        world.die_and_return()
        (tried,) = world.die_and_return()
        if how == "client left":
            world.requests.abort([tried])
            assert len(world.taken()) == 1
            world.requests.abort(["a", "b", "c"])
            assert len(world.requests) == 0
        else:
            world.requests.submit_all()
            assert sorted([tried, *world.taken()]) == ["a", "b", "c"]

    asyncio.run(scenario())


@in_a_loop
async def test_draft_tokens_that_the_next_engine_cannot_make_are_not_asked_for() -> None:
    """Law: a request continues without its proposers or bound if the next engine lacks them."""
    speculations = [
        Speculation(proposers=("ngram",)),
        Speculation(max_draft=3),
        Speculation(max_draft=2, proposers=("draft_model",)),
    ]
    world = World()
    for i, speculation in enumerate(speculations):
        params = SamplingParams(seed=1, max_tokens=10, speculation=speculation)
        world.requests.add(Submit(f"{i}", [1], params, 0.0))
    world.lose(planned=True)
    world.commands.clear()
    world.requests.resume_on(make_ready(k_max=2, proposers=("draft_model",)))
    resubmitted = [one.params.speculation for one in world.commands if isinstance(one, Submit)]
    assert resubmitted == [None, None, speculations[2]]


@in_a_loop
async def test_a_request_between_two_engines_is_held_as_well() -> None:
    """Law: it goes to the next engine unchanged, is no suspect of a later loss, and ends with an
    error if no engine comes in time."""
    world = World(seconds=0.05)
    world.add("before")
    world.lose()
    world.taken()
    world.requests.add(Submit("between", [1, 2], PARAMS, 0.0), waits=True)
    late = world.requests.add(Submit("late", [1, 2], PARAMS, 0.0), waits=True)
    assert world.taken() == []
    world.requests.resume_on(READY)
    assert world.taken() == ["before", "between", "late"]
    world.say("between", 5, cached_tokens=0)
    await asyncio.sleep(0.1)
    with pytest.raises(EngineLost, match=r"within 0\.05 s"):
        take(late)
    assert world.outcomes == ["resumed", "too_late", "too_late"]
