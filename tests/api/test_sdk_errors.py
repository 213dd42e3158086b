"""Every refusal arrives as the official SDK's own exception, with the fields that users read.

PermissionDeniedError, ConflictError and UnprocessableEntityError are never raised here, since no
reply is a 403, 409 or 422.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.support.byte_tokenizer import ByteTokenizer
from tests.support.fake_client import FakeClient
from tests.support.serving import MODEL, Served, serve

HELLO: Any = [{"role": "user", "content": "hello"}]
KEY = "sk-a-key"


class Buggy(ByteTokenizer):
    """A tokenizer that cannot encode one text."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if text == "bug":
            raise RuntimeError("of ours")
        return super().encode(text, add_special_tokens=add_special_tokens)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve(
        FakeClient(), tokenizer=Buggy(), api_key=KEY, max_body_bytes=5000, max_inflight=8
    ) as served:
        yield served


@pytest.fixture(scope="module")
def sdk(served: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=0) as sdk:
        yield sdk


def chat(sdk: OpenAI, **fields: Any) -> Any:
    return sdk.chat.completions.create(**{"model": MODEL, "messages": HELLO, **fields})


def deep(part: dict[str, Any]) -> Any:
    message = {"role": "user", "content": [{"type": "text", "text": "a"}, part]}
    return [*HELLO, *HELLO, message]


Call = Callable[[OpenAI], Any]
BAD = openai.BadRequestError
CASES: dict[str, tuple[Call, type[openai.APIStatusError], int, str | None, str]] = {
    "a field": (
        lambda sdk: chat(sdk, temperature=3), BAD, 400, "temperature", "invalid_value",
    ),
    "a path": (
        lambda sdk: chat(sdk, messages=deep({"type": "image_url"})), BAD, 400,
        "messages[2].content[1].type", "unsupported_field",
    ),
    "a part of a field": (
        lambda sdk: chat(sdk, metadata={"a": 1}), BAD, 400, "metadata.a", "invalid_value",
    ),
    "missing": (
        lambda sdk: sdk.post("/completions", cast_to=object, body={"model": MODEL}), BAD, 400,
        "prompt", "missing_field",
    ),
    "unknown": (
        lambda sdk: chat(sdk, extra_body={"mood": 1}), BAD, 400, "mood", "unknown_field",
    ),
    "refused": (
        lambda sdk: chat(sdk, verbosity="low"), BAD, 400, "verbosity", "unsupported_field",
    ),
    "too long": (
        lambda sdk: sdk.completions.create(model=MODEL, prompt=[1] * 600), BAD, 400,
        "prompt", "context_length_exceeded",
    ),
    "no JSON": (
        lambda sdk: sdk.post("/completions", cast_to=object, content=b"{"), BAD, 400,
        None, "invalid_json",
    ),
    "model": (
        lambda sdk: chat(sdk, model="gpt-4o"), openai.NotFoundError, 404, "model",
        "model_not_found",
    ),
    "model card": (
        lambda sdk: sdk.models.retrieve("gpt-4o"), openai.NotFoundError, 404, "model",
        "model_not_found",
    ),
    "route": (
        lambda sdk: sdk.get("/nothing", cast_to=object), openai.NotFoundError, 404,
        None, "unknown_route",
    ),
    "what is not served": (
        lambda sdk: sdk.embeddings.create(model=MODEL, input="a"), openai.NotFoundError, 404,
        None, "unsupported_endpoint",
    ),
    "method": (
        lambda sdk: sdk.get("/completions", cast_to=object), openai.APIStatusError, 405,
        None, "method_not_allowed",
    ),
    "body": (
        lambda sdk: sdk.completions.create(model=MODEL, prompt="a" * 6000),
        openai.APIStatusError, 413, None, "body_too_large",
    ),
    "compressed": (
        lambda sdk: chat(sdk, extra_headers={"Content-Encoding": "gzip"}),
        openai.APIStatusError, 415, None, "unsupported_encoding",
    ),
    "too many": (
        lambda sdk: sdk.completions.create(model=MODEL, prompt="a", n=9), BAD, 400, "n",
        "invalid_value",
    ),
    "a bug": (
        lambda sdk: sdk.completions.create(model=MODEL, prompt="bug"),
        openai.InternalServerError, 500, None, "internal",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_each_refusal_is_the_sdks_own_exception(sdk: OpenAI, case: str) -> None:
    """The status selects the class; message, type, param and code come from the envelope."""
    call, kind, status, param, code = CASES[case]
    with pytest.raises(openai.APIStatusError) as caught:
        call(sdk)
    error = caught.value
    assert type(error) is kind
    assert (error.status_code, error.param, error.code) == (status, param, code)
    assert error.type == ("server_error" if status >= 500 else "invalid_request_error")
    body: Any = error.body
    assert set(body) == {"message", "type", "param", "code"}
    assert body["message"] in str(error)
    assert error.response.headers["content-type"] == "application/json"


def test_without_the_key(served: Served) -> None:
    """401 on every path, unknown routes included."""
    with OpenAI(base_url=f"{served.url}/v1", api_key="sk-wrong", max_retries=0) as sdk:
        for call in (chat, lambda sdk: sdk.embeddings.create(model=MODEL, input="a")):
            with pytest.raises(openai.AuthenticationError) as refused:
                call(sdk)
            assert refused.value.code == "invalid_api_key"
            assert refused.value.response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    ("state", "seconds"), [("starting", "2"), ("lost", "2"), ("draining", "2"), ("failed", "2")]
)
def test_an_unavailable_engine(served: Served, sdk: OpenAI, state: Any, seconds: str) -> None:
    """InternalServerError, which the SDK retries by itself after the time in Retry-After."""
    served.client.state = state
    try:
        with pytest.raises(openai.InternalServerError) as down:
            chat(sdk)
    finally:
        served.client.state = "ready"
    assert down.value.status_code == 503
    assert down.value.code == "engine_unavailable"
    assert down.value.response.headers["retry-after"] == seconds


def test_a_full_server() -> None:
    """RateLimitError; the request can be repeated later."""
    with (
        serve(FakeClient(gate=asyncio.Semaphore(0)), max_inflight=1) as served,
        OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as sdk,
    ):
        stream = chat(sdk, stream=True)
        served.until(lambda: served.client.inflight == 1)
        with pytest.raises(openai.RateLimitError) as full:
            chat(sdk)
        assert (full.value.type, full.value.code) == ("rate_limit_error", "queue_full")
        assert full.value.response.headers["retry-after"] == "1"
        stream.close()


def test_a_stream_that_breaks_off() -> None:
    """After the text before it, the error event raises in the reading loop, sync and async."""
    gate = asyncio.Semaphore(0)
    with serve(FakeClient(gate=gate)) as served:

        def lose() -> None:
            served.client.die("the engine was lost")

        with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as sdk:
            stream = sdk.completions.create(model=MODEL, prompt="a", stream=True)
            served.call(gate.release)
            assert next(iter(stream)).choices[0].text
            served.call(lose)
            with pytest.raises(openai.APIError) as broken:
                list(stream)
            assert "the engine was lost" in str(broken.value)
            assert broken.value.code == "engine_unavailable"
        served.client.state = "ready"

        async def read() -> None:
            async with AsyncOpenAI(
                base_url=f"{served.url}/v1", api_key="none", max_retries=0
            ) as sdk:
                stream = await sdk.completions.create(model=MODEL, prompt="a", stream=True)
                served.until(lambda: served.client.inflight == 1)
                served.call(lose)
                with pytest.raises(openai.APIError):
                    async for _ in stream:
                        pass

        asyncio.run(read())


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"])
def test_other_methods(served: Served, method: str) -> None:
    """405 in the envelope, with the methods that are allowed."""
    headers = {"Authorization": f"Bearer {KEY}"}
    reply = httpx.request(method, f"{served.url}/v1/chat/completions", headers=headers)
    assert reply.status_code == 405
    assert reply.json()["error"]["code"] == "method_not_allowed"
    assert reply.headers["allow"] == "POST"


@pytest.mark.parametrize("path", ["/v2", "/v1", "/v1/", "/v1/completions/", "//v1/models", "/%00"])
def test_other_paths(served: Served, path: str) -> None:
    """404 in the envelope; no redirects, which clients would follow with a GET."""
    reply = httpx.get(f"{served.url}{path}", headers={"Authorization": f"Bearer {KEY}"})
    assert reply.status_code == 404
    assert reply.json()["error"]["code"] == "unknown_route"
