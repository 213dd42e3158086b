"""`resume`: a reply that broke off is continued, by this replica or another one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.support.fake_client import FakeClient, hashed_script
from tests.support.serving import MODEL, Served, serve
from tests.support.tools import CALLS, HELLO, TOOLS, scripted

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEXT = "Zürich 日本 = 🎈🎈, a stop, and more of it."
BROKEN = bytes([0xF0, 0x9F, 97, 0x8E, 0x8E, 0x8E, 98, 0xE6, 0x97, 0xE6, 0x97, 0xA5, 0xF0])
USAGE = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}

# Name -> text of the engine, route, fields.
REPLIES: dict[str, tuple[str | bytes, str, dict[str, Any]]] = {
    "text": (TEXT, COMPLETIONS, {}),
    "length": (TEXT, COMPLETIONS, {"max_tokens": 21}),
    "broken bytes": (BROKEN, COMPLETIONS, {}),
    "broken to the end": (BROKEN, COMPLETIONS, {"max_tokens": len(BROKEN)}),
    "stopped": (TEXT, COMPLETIONS, {"stop": ["stop,", "top!"]}),
    "nearly stopped": (TEXT, COMPLETIONS, {"stop": ["stop!", "it.."]}),
    "stop token": (TEXT, COMPLETIONS, {"stop_token_ids": [ord(",")]}),
    "shown stop": (TEXT, COMPLETIONS, {"stop": ["stop"], "include_stop_str_in_output": True}),
    "log-probabilities": (TEXT, COMPLETIONS, {"logprobs": 2}),
    "chat": (TEXT, CHAT, {}),
    "chat with log-probabilities": (TEXT, CHAT, {"logprobs": True, "top_logprobs": 1}),
    "tools": (CALLS, CHAT, {"tools": TOOLS}),
    "tools cut short": (CALLS, CHAT, {"tools": TOOLS, "max_tokens": 60}),
}


@dataclass
class MergedStream:
    """What the chunks of a stream add up to."""

    text: str = ""
    calls: list[list[str]] = field(default_factory=list)  # name, arguments
    ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    roles: list[str] = field(default_factory=list)
    finish: str | None = None
    usage: Any = None
    seed: int | None = None
    prompt: list[int] = field(default_factory=list)

    def add(self, chunk: dict[str, Any]) -> None:
        self.usage = chunk.get("usage") or self.usage
        self.seed = chunk.get("seed", self.seed)
        self.prompt += chunk.get("prompt_token_ids", ())
        for choice in chunk["choices"]:
            delta = choice.get("delta", {})
            self.roles += [delta["role"]] if "role" in delta else []
            self.text += choice.get("text") or delta.get("content") or ""
            for piece in delta.get("tool_calls", ()):
                if "id" in piece:
                    self.calls.append([piece["function"]["name"], ""])
                else:
                    self.calls[-1][1] += piece["function"]["arguments"]
            self.ids += choice.get("token_ids", ())
            self.prompt += choice.get("prompt_token_ids", ())
            logprobs = choice["logprobs"] or {}
            self.logprobs += logprobs.get("content", ())
            if "tokens" in logprobs:
                self.logprobs += zip(*(logprobs[name] for name in sorted(logprobs)), strict=True)
            self.finish = choice["finish_reason"] or self.finish

    def known(self) -> tuple[Any, ...]:
        kept = dict(self.usage)
        del kept["speculation"]
        return self.text, self.calls, self.ids, self.logprobs, self.prompt, self.finish, kept


def chunks(url: str, route: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    reply = httpx.post(f"{url}{route}", json={"model": MODEL, **body}, timeout=30)
    assert reply.status_code == 200, reply.text
    events = [line[6:] for line in reply.text.split("\n") if line.startswith("data: ")]
    assert events[-1] == "[DONE]", events[-1]
    return [json.loads(event) for event in events[:-1]]


@pytest.mark.parametrize("tokens_per_step", [1, 3])
@pytest.mark.parametrize("name", REPLIES)
def test_the_two_parts_are_the_reply(name: str, tokens_per_step: int) -> None:
    """Law: wherever a reply breaks off (except between the chunks of one step, the last of which
    has the ids), its chunks and the rest add up to the whole reply: text, calls, ids,
    log-probabilities and finish. The rest reports the usage of the whole. A reply that was complete
    just ends again."""
    text, route, fields = REPLIES[name]
    prompt: dict[str, Any] = {"messages": HELLO} if route == CHAT else {"prompt": "ab"}
    body = {**prompt, "max_tokens": 400, "seed": 7, **USAGE, **fields}
    engine = scripted("", tokens_per_step=tokens_per_step)
    engine._script = scripted_bytes(text)
    with serve(engine) as served:
        found = chunks(served.url, route, body)
        whole = MergedStream()
        for chunk in found:
            whole.add(chunk)
        for cut in range(1, len(found)):
            merged = MergedStream()
            for chunk in found[:cut]:
                merged.add(chunk)
            if merged.calls and "token_ids" not in found[cut - 1]["choices"][0]:
                continue
            resume = {"token_ids": merged.ids, "seed": merged.seed}
            for chunk in chunks(served.url, route, {**body, "resume": resume}):
                merged.add(chunk)
            assert merged.known() == whole.known(), f"cut behind {cut} chunks"
            assert merged.roles == whole.roles


def scripted_bytes(text: str | bytes) -> Any:
    data = text.encode() if isinstance(text, str) else text
    return lambda submit, position: data[position] if position < len(data) else 256


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve(FakeClient(script=hashed_script())) as served:
        yield served


def test_the_engine_gets_the_ids_and_the_seed(served: Served) -> None:
    """Law: the ids count as generated, the seed is the reply's, and an unstreamed reply is also
    only the rest."""
    body = {"model": MODEL, "prompt": "ab", "max_tokens": 8, "return_token_ids": True}
    whole = httpx.post(f"{served.url}{COMPLETIONS}", json=body).json()
    ids, seed = whole["choices"][0]["token_ids"], whole["seed"]
    resume = {
        "token_ids": ids[:5],
        "seed": seed,
        "system_fingerprint": whole["system_fingerprint"],
    }
    rest = httpx.post(f"{served.url}{COMPLETIONS}", json={**body, "resume": resume}).json()
    assert served.client.submitted[-1].begun.tokens == ids[:5]
    assert rest["seed"] == seed
    assert rest["choices"][0]["token_ids"] == ids[5:]
    assert whole["choices"][0]["text"].endswith(rest["choices"][0]["text"])
    assert rest["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize(("route", "stream"), [(COMPLETIONS, False), (CHAT, False), (CHAT, True)])
def test_a_complete_reply_has_no_more_ids(route: str, stream: bool, served: Served) -> None:
    """Bug: a chat had no `token_ids` then, though they were asked for."""
    given: dict[str, Any] = {"messages": HELLO} if route == CHAT else {"prompt": "ab"}
    resume = {"token_ids": [97, 98], "seed": 7}
    body = {"model": MODEL, "max_tokens": 2, "return_token_ids": True, "resume": resume, **given}
    if stream:
        *_, found = chunks(served.url, route, {**body, "stream": True})
    else:
        found = httpx.post(f"{served.url}{route}", json=body).json()
    assert found["choices"][0]["token_ids"] == []
    assert found["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("fields", "resume", "says"),
    [
        ({"n": 2}, {}, "one choice"),
        ({"prompt": ["a", "b"]}, {}, "one prompt"),
        ({"best_of": 2}, {}, "one choice"),
        ({"echo": True}, {}, "without `echo`"),
        ({"prompt_logprobs": 1}, {}, "without `prompt_logprobs`"),
        ({"provenance": True}, {}, "without `provenance`"),
        ({"stop": "x", "logprobs": 1}, {}, "without `stop`"),
        ({}, {"seed": None}, "`resume.seed` is required"),
        ({"seed": 8}, {}, "`resume.seed` is 7, but `seed` is 8"),
        ({}, {"seed": 2**64}, "`resume.seed` must be less than 18446744073709551616"),
        ({}, {"seed": -(2**70)}, "`resume.seed` must be at least -9223372036854775808"),
        ({}, {"seed": 10**400}, "`resume.seed` must be less than 18446744073709551616"),
        ({"max_tokens": 1}, {}, "2 ids; at most 1"),
        ({}, {"token_ids": [97, 258]}, "from 0 to 257"),
        ({}, {"token_ids": "ab"}, "`resume"),
        ({}, {"token_ids": None}, "`resume"),
        ({}, {"system_fingerprint": "fp_other"}, "could not be continued exactly"),
        ({}, {"text": "ab"}, "`resume"),
    ],
)
def test_what_cannot_be_resumed_is_refused(
    fields: dict[str, Any], resume: dict[str, Any], says: str, served: Served
) -> None:
    """Law: a 400 that names the field, before anything is submitted."""
    before = len(served.client.submitted)
    value = {"token_ids": [97, 98], "seed": 7, **resume}
    body = {"model": MODEL, "prompt": "ab", **fields, "resume": value}
    reply = httpx.post(f"{served.url}{COMPLETIONS}", json=body)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert says in error["message"]
    assert error["param"].startswith("resume")
    assert len(served.client.submitted) == before


def test_tools_resume_in_streams_only(served: Served) -> None:
    """Law: a message can begin in the middle of a call only in a stream, part by part."""
    body = {"model": MODEL, "messages": HELLO, "tools": TOOLS}
    resume = {"token_ids": [97], "seed": 7}
    reply = httpx.post(f"{served.url}{CHAT}", json={**body, "resume": resume})
    assert reply.status_code == 400
    assert "`stream`" in reply.json()["error"]["message"]


def test_temperature_0_needs_no_seed(served: Served) -> None:
    """Law: at temperature 0 no seed is required."""
    body = {"model": MODEL, "prompt": "ab", "temperature": 0, "resume": {"token_ids": [97]}}
    assert httpx.post(f"{served.url}{COMPLETIONS}", json=body).status_code == 200
