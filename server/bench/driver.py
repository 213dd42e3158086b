"""The comparison on a running server. One engine serves all arms, and its controller sees them all,
so auto serves an unmeasured round before each of its turns.

A Foretoken is switched between modes by POST /speculation, and at the end put back into the mode
that it was found in. Any other server has one arm: as it is.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

from engine.comparison.arms import AUTO, SERVED, Arm
from engine.comparison.grid import Lane, Request
from engine.comparison.runs import Guesses, Reply, Run, first_waits
from engine.errors import ConfigError
from server.bench.client import Client, Refused, read_json

_DRAFTED = "spec_decode_num_draft_tokens_per_pos_total"
_ACCEPTED = "spec_decode_num_accepted_tokens_per_pos_total"
_CHOSEN = "spec_decode_chosen_k_total"


class Served:
    """runs.Driver over HTTP. Raises ConfigError when the server is not there or has no model."""

    def __init__(self, client: Client, *, model: str | None, admin_key: str | None) -> None:
        self._client, self._admin_key = client, admin_key
        self.model = model or _first_model(client)
        self._found = _speculation(client)
        self.is_foretoken = self._found is not None
        self.facts = _version(client) if self.is_foretoken else {}
        self.exact = bool(self.facts.get("exact", self.facts.get("dtype") == "float32"))
        self._names = count()
        self._settling: Sequence[Lane] = ()
        self._present: Arm | None = None
        self._ignores_eos = True
        if not self.is_foretoken:
            self._try_ignore_eos()

    @property
    def k_max(self) -> int:
        """The largest K that the server can be switched to."""
        return int(self._found["k_max"]) if self._found else 0

    def restore(self) -> None:
        """The mode in which the server was found."""
        if self._found and self._present is not None:
            found = self._found
            k = {"k": found["k"]} if found["mode"] == "fixed" else {}
            self._post({"mode": found["mode"], **k})

    def warm(self, prompts: Sequence[str]) -> None:
        """Into the prefix cache, of the draft too."""
        if self.is_foretoken:
            self._switch(Arm("fixed", 1) if self.k_max else Arm("off"))
        with ThreadPoolExecutor(8) as pool:
            asked = [Request(prompt, 0.0, 0, 2) for prompt in prompts]
            list(pool.map(lambda request: self._complete(request, Reply(0, 0.0), 0.0, ""), asked))

    def first_tokens(self, arm: Arm, lanes: Sequence[Lane]) -> list[float]:
        """Of the first request of each lane; a Foretoken is asked under a salt of its own."""
        self._switch(arm)
        firsts = [[Request(r.prompt, r.temperature, r.seed, 1)] for r, *_ in lanes]
        return first_waits(self._work(firsts, f"bench-{next(self._names)}"))

    def settle(self, arm: Arm, lanes: Sequence[Lane]) -> None:
        self._settling = lanes

    def run(self, arm: Arm, lanes: Sequence[Lane]) -> Run:
        self._switch(arm)
        if arm == AUTO:
            self._work(self._settling, "")
        before = self._client.counters()
        run = self._work(lanes, "")
        run.guesses = guesses(before, self._client.counters())
        return run

    def _switch(self, arm: Arm) -> None:
        if arm in (SERVED, self._present):
            return
        self._post({"mode": arm.mode, **({"k": arm.k} if arm.mode == "fixed" else {})})
        self._present = arm

    def _post(self, said: dict[str, Any]) -> None:
        try:
            self._client.post("/speculation", said, key=self._admin_key)
        except Refused as error:
            hint = (
                "; --admin-key gives the server's admin key" if error.status in (401, 403) else ""
            )
            raise ConfigError(f"{error}{hint}") from None

    def _work(self, lanes: Sequence[Lane], salt: str) -> Run:
        """Every lane in a thread of its own, until all have nothing left."""
        if not lanes:
            return Run([])
        began = time.perf_counter()

        def ask(lane: int) -> list[Reply]:
            replies = []
            for request in lanes[lane]:
                reply = Reply(lane, time.perf_counter() - began)
                self._complete(request, reply, began, salt)
                replies.append(reply)
            return replies

        with ThreadPoolExecutor(len(lanes)) as pool:
            found = list(pool.map(ask, range(len(lanes))))
        return Run([reply for replies in found for reply in replies])

    def _complete(self, request: Request, reply: Reply, began: float, salt: str) -> None:
        """Fill in arrivals and text."""
        ids: list[int] = []
        text, tokens = "", None
        for event in self._client.stream("/v1/completions", self._body(request, salt)):
            now = time.perf_counter() - began
            for choice in event.get("choices", []):
                got = choice.get("token_ids") or []
                ids += got
                text += choice.get("text") or ""
                if got or choice.get("text"):
                    reply.arrivals.append((now, len(got) or 1))
            if event.get("usage"):
                tokens = event["usage"].get("completion_tokens")
        reply.text = ids or text
        if not ids and tokens:
            _spread(reply, tokens)

    def _body(self, request: Request, salt: str) -> dict[str, Any]:
        body = {
            "model": self.model,
            "prompt": request.prompt,
            "max_tokens": request.tokens,
            "temperature": request.temperature,
            "seed": request.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._ignores_eos:
            body["ignore_eos"] = True
        if self.is_foretoken:
            body["return_token_ids"] = True
            if salt:
                body["cache_salt"] = salt
        return body

    def _try_ignore_eos(self) -> None:
        """Not OpenAI's, but most servers' own; without it replies may be shorter than asked."""
        try:
            self._complete(Request("x", 0.0, 0, 1), Reply(0, 0.0), 0.0, "")
        except Refused:
            self._ignores_eos = False


def guesses(before: dict[tuple[str, int], float], after: dict[tuple[str, int], float]) -> Guesses:
    """What a server's counters of speculation grew by."""

    def grown(name: str) -> list[float]:
        indices = [index for counter, index in after if counter == name]
        return [
            after.get((name, index), 0.0) - before.get((name, index), 0.0)
            for index in range(max(indices, default=-1) + 1)
        ]

    return Guesses(grown(_DRAFTED), grown(_ACCEPTED), grown(_CHOSEN))


def _spread(reply: Reply, tokens: int) -> None:
    """Deliveries of unknown size, made to add up to the server's count."""
    share, total = tokens / len(reply.arrivals or [0]), 0
    for index, (at, _) in enumerate(reply.arrivals):
        upto = round(share * (index + 1))
        reply.arrivals[index] = (at, upto - total)
        total = upto


def _first_model(client: Client) -> str:
    try:
        listed = read_json(client.get("/v1/models"), "/v1/models")
        return str(listed["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise ConfigError(f"{client.url} lists no model at /v1/models") from None


def _speculation(client: Client) -> dict[str, Any] | None:
    """GET /speculation of a Foretoken, None for any other server."""
    try:
        found = read_json(client.get("/speculation"), "/speculation")
    except Refused as error:
        if error.status in (401, 403, 503):
            raise
        return None
    except ConfigError:
        return None  # not JSON
    is_ours = isinstance(found, dict) and found.get("object") == "speculation"
    return found if is_ours else None


def _version(client: Client) -> dict[str, Any]:
    found: dict[str, Any] = read_json(client.get("/version"), "/version")
    return found
