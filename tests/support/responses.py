"""Shared by the tests of /v1/responses: a request, and an input item."""

from __future__ import annotations

from typing import Any

from tests.support.serving import MODEL

RESPONSES = "/v1/responses"
BODY: dict[str, Any] = {"model": MODEL, "input": "hello", "max_output_tokens": 7, "seed": 3}
SAID: dict[str, Any] = {
    "type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}],
}  # fmt: skip
