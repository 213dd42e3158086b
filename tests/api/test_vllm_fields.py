"""Fields that vLLM's clients send: truncated prompts, guided_*, request_id."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.api.test_fields import BODIES, GOOD, PATHS, SHAPES, TOOLS
from tests.support.byte_tokenizer import BOS, FIM_MIDDLE, FIM_PREFIX, FIM_SUFFIX, ByteTokenizer
from tests.support.serving import Served, serve

CONTEXT = 512


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve() as served:
        yield served


def post(served: Served, endpoint: str, **fields: Any) -> httpx.Response:
    body = {**BODIES[endpoint], **fields}
    return httpx.post(f"{served.url}{PATHS[endpoint]}", json=body, timeout=120)


def refused(served: Served, endpoint: str, **fields: Any) -> dict[str, Any]:
    reply = post(served, endpoint, **fields)
    assert reply.status_code == 400, reply.text
    return dict(reply.json()["error"])


def prompt(served: Served, endpoint: str, **fields: Any) -> list[int]:
    assert post(served, endpoint, **fields).status_code == 200
    return list(served.client.submitted[-1].prompt)


@pytest.mark.parametrize("text", ["abcdef", [97, 98, 99, 100, 101, 102]])
def test_the_last_tokens_of_a_prompt_are_kept(served: Served, text: Any) -> None:
    """Law: each prompt keeps its last `truncate_prompt_tokens` tokens; a shorter one is whole."""
    assert prompt(served, "completions", prompt=text, truncate_prompt_tokens=2) == [101, 102]
    assert prompt(served, "completions", prompt=[[1, 2, 3], [4]], truncate_prompt_tokens=2) == [4]
    whole = prompt(served, "completions", prompt=text)
    assert prompt(served, "completions", prompt=text, truncate_prompt_tokens=9) == whole
    reply = post(served, "completions", prompt=text, truncate_prompt_tokens=2)
    assert reply.json()["usage"]["prompt_tokens"] == 2


def test_a_conversation_is_cut_as_the_template_wrote_it(served: Served) -> None:
    """As in vLLM, the templated prompt is cut at its start, so the system message goes first."""
    whole = prompt(served, "chat")
    assert prompt(served, "chat", truncate_prompt_tokens=7) == whole[-7:]


def test_only_the_end_of_a_long_text_is_read() -> None:
    """Law: the context bounds the tokenising, as it does for texts that are refused."""

    class Reader(ByteTokenizer):
        read = 0

        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            self.read = max(self.read, len(text))
            return super().encode(text, add_special_tokens=add_special_tokens)

    reader = Reader()
    longest = max(map(len, map(reader.token_bytes, range(reader.vocab_size))))
    with serve(tokenizer=reader) as served:
        for text in ("ab" * 100_000, "\u00e4" * 100_000):
            ids = prompt(served, "completions", prompt=text, truncate_prompt_tokens=3)
            assert ids == list(text.encode()[-3:])
        assert reader.read <= CONTEXT * longest


@pytest.mark.parametrize(
    ("fields", "kept"),
    [({"max_tokens": 12}, CONTEXT - 12), ({"max_tokens": None}, CONTEXT - 1)],
)
def test_minus_one_keeps_what_the_context_holds(
    served: Served, fields: dict[str, Any], kept: int
) -> None:
    """Law: -1 keeps what the context holds beside the requested tokens, of a text of any length."""
    text = "ab" * 100_000
    prompts: dict[str, dict[str, Any]] = {
        "completions": {"prompt": text},
        "chat": {"messages": [{"role": "user", "content": text}]},
    }
    for endpoint, body in prompts.items():
        assert len(prompt(served, endpoint, **body, **fields, truncate_prompt_tokens=-1)) == kept
        error = refused(served, endpoint, **body, **fields, truncate_prompt_tokens=CONTEXT + 1)
        assert error["code"] == "context_length_exceeded"
        assert refused(served, endpoint, **body)["code"] == "context_length_exceeded"


def test_what_cannot_be_cut_is_refused(served: Served) -> None:
    """Truncation would cut the start of an infill's prefix and the text of an echo."""
    beside: list[dict[str, Any]] = [{"echo": True}, {"suffix": "a"}]
    for fields in beside:
        error = refused(served, "completions", **fields, truncate_prompt_tokens=4)
        assert error["param"] == "truncate_prompt_tokens"
    for value in (0, -2, "4", True, 2**31):
        assert refused(served, "chat", truncate_prompt_tokens=value)["param"] == (
            "truncate_prompt_tokens"
        )


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
@pytest.mark.parametrize("second", SHAPES[1:])
def test_one_field_shapes_the_text(served: Served, endpoint: str, second: str) -> None:
    """Law: two fields that constrain the text are a 400 that names both; a neutral one may be."""
    first = SHAPES[SHAPES.index(second) - 1]
    error = refused(served, endpoint, **{name: GOOD[name] for name in (first, second)})
    assert error["param"] == second
    assert f"`{first}`" in error["message"]
    text = {"response_format": {"type": "text"}, second: GOOD[second]}
    assert post(served, endpoint, **text).status_code == 200


def test_guided_fields_are_checked_as_the_newer_ones(served: Served) -> None:
    """Errors name the guided_* field, for shapes, for grammars and beside tools."""
    bad: list[tuple[str, Any]] = [
        ("guided_json", {"type": 3}), ("guided_json", "{"), ("guided_json", []),
        ("guided_regex", "("), ("guided_regex", ""), ("guided_choice", []),
        ("guided_choice", "a"), ("guided_grammar", "start: ("),
    ]  # fmt: skip
    for name, value in bad:
        assert refused(served, "chat", **{name: value})["param"] == name
    assert post(served, "chat", guided_json='{"type": "object"}').status_code == 200
    assert refused(served, "chat", guided_regex="a", tools=TOOLS)["param"] == "guided_regex"


def test_special_tokens_are_added_as_asked(served: Served) -> None:
    """Law: without `add_special_tokens`, each endpoint keeps its default."""
    assert prompt(served, "completions", prompt="a") == [BOS, 97]
    assert prompt(served, "completions", prompt="a", add_special_tokens=False) == [97]
    gap = prompt(served, "completions", prompt="a", suffix="b", add_special_tokens=False)
    assert gap == [FIM_PREFIX, 97, FIM_SUFFIX, 98, FIM_MIDDLE]
    chat = prompt(served, "chat")
    assert prompt(served, "chat", add_special_tokens=True) == [BOS, *chat]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("endpoint", BODIES)
def test_request_id_names_the_request(
    served: Served, endpoint: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Law: reply, header and log use `request_id`; an X-Request-Id header wins in the header and
    the log. Two requests at a time may share an id."""
    with caplog.at_level(logging.INFO):
        reply = post(served, endpoint, request_id="job/7", stream=stream)
        served.until(lambda: "request=job/7" in caplog.text, seconds=60)  # may follow the reply
    prefixes = {"completions": "cmpl-", "chat": "chatcmpl-", "responses": "resp_"}
    prefix = prefixes.get(endpoint, "msg_")
    assert f'"id":"{prefix}job/7"' in reply.text
    assert reply.headers["x-request-id"] == "job/7"
    body = {**BODIES[endpoint], "request_id": "job/7", "stream": stream}
    header = {"x-request-id": "header"}
    other = httpx.post(f"{served.url}{PATHS[endpoint]}", json=body, headers=header, timeout=120)
    assert f'"id":"{prefix}job/7"' in other.text
    assert other.headers["x-request-id"] == "header"
    assert served.client.submitted[-1].id != served.client.submitted[-2].id
    for refusal in ({"model": "x"}, {"priority": 1}):  # the second by the settings
        named = post(served, endpoint, request_id="job/7", **refusal)
        assert (named.is_error, named.headers["x-request-id"]) == (True, "job/7")
    for bad in ("", "a b", "a\n", "a" * 129):
        assert refused(served, endpoint, request_id=bad)["param"] == "request_id"


@pytest.mark.parametrize(
    ("path", "code", "problem"),
    [
        ("/v1/embeddings", "unsupported_endpoint", "generates text"),
        ("/v1/audio/speech", "unsupported_endpoint", "/v1/audio/speech"),
        ("/v1/images/generations", "unsupported_endpoint", "generates text"),
        ("/v1/moderations", "unsupported_endpoint", "generates text"),
        ("/rerank", "unsupported_endpoint", "generates text"),
        ("/v2/rerank", "unsupported_endpoint", "generates text"),
        ("/v1/score", "unsupported_endpoint", "generates text"),
        ("/v1/files", "unsupported_endpoint", "generates text"),
        ("/chat/completions", "unknown_route", "there is /v1/chat/completions"),
        ("/v1/chat/completions/", "unknown_route", "there is /v1/chat/completions"),
        ("/v1/v1/models", "unknown_route", "there is /v1/models"),
        ("/v1/health", "unknown_route", "there is /health"),
        ("/v1/nothing", "unknown_route", "no route /v1/nothing"),
    ],
)
def test_missing_routes_are_explained(served: Served, path: str, code: str, problem: str) -> None:
    """Law: a 404, at which SDKs raise at once, says what is missing and names a similar route."""
    reply = httpx.post(f"{served.url}{path}", json={"model": "m"}, timeout=120)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (404, code)
    assert problem in error["message"]
