"""A client that continues broken streams with `resume`, as docs/api.md describes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.golden.replay import MODEL, Refused, kept, whole
from tests.golden.requests import Request

ATTEMPTS = 20
PAUSE = 0.25  # seconds between attempts


@dataclass
class Received:
    """The events of a reply, over all its parts. `settled`: how many of them to keep when it breaks
    off, namely up to the last token ids."""

    lines: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    settled: int = 0
    seed: int | None = None
    fingerprint: str | None = None
    resumed: int = 0  # parts after the first

    def add(self, line: str) -> None:
        event = json.loads(line.removeprefix("data: "))
        if self.resumed:  # each part repeats the ids of the prompt
            for one in (event, *event["choices"]):
                one.pop("prompt_token_ids", None)
        self.lines.append(f"data: {json.dumps(event)}")
        self.seed = event.get("seed", self.seed)
        self.fingerprint = event.get("system_fingerprint", self.fingerprint)
        for choice in event["choices"]:
            if "token_ids" in choice:
                self.ids += choice["token_ids"]
                self.settled = len(self.lines)

    def break_off(self) -> None:
        del self.lines[self.settled :]

    @property
    def resume(self) -> dict[str, Any]:
        """Return the fields that resume the reply; none before its first token."""
        if not self.ids:
            return {}
        value = {"token_ids": self.ids, "seed": self.seed, "system_fingerprint": self.fingerprint}
        return {"resume": value}


def read(http: httpx.Client, request: Request, *, seen: Callable[[], object]) -> Received:
    """Read a streamed reply and resume it whenever it breaks off. Call `seen` after each event.
    Raises Refused if the server cannot resume it, RuntimeError after ATTEMPTS."""
    (route, fields), received = request, Received()
    for _ in range(ATTEMPTS):
        body = {**fields, "model": MODEL, **received.resume}
        received.resumed += bool(received.ids)
        try:
            with http.stream("POST", route, json=body) as reply:
                if reply.status_code == 200 and _take(reply, received, seen):
                    return received
                if 400 <= reply.status_code < 500:
                    raise Refused(reply.status_code, reply.read().decode())
        except httpx.TransportError:
            pass
        received.break_off()
        time.sleep(PAUSE)
    raise RuntimeError(f"{ATTEMPTS} attempts, and no reply to {route} {fields}")


def _take(reply: httpx.Response, received: Received, seen: Callable[[], object]) -> bool:
    """Read the events of one part; return whether the reply is complete."""
    for line in reply.iter_lines():
        if line == "data: [DONE]":
            return True
        if line.startswith('data: {"error"'):
            return False
        if line.startswith("data: "):
            received.add(line)
            seen()
    return False


def reply_of(request: Request, received: Received) -> Any:
    """Return the parts of the reply that must equal those of an uninterrupted one."""
    return kept(whole(request[0], "\n".join([*received.lines, "data: [DONE]"])))
