"""The comparison on a running server. One engine serves all arms, and its controller sees them all,
so auto serves an unmeasured round before each of its turns.

A Foredraft is switched between modes by POST /speculation, and at the end put back into the mode
that it was found in. Any other server has one arm: as it is. It is asked for plain sampling, and
for replies that end-of-text does not end, as far as it takes the fields for that; its tokens are
counted by their ids or by its usage, never by its events.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

from engine.errors import ConfigError
from engine.lab.comparison.figures import Guesses, Reply, Run, first_waits
from engine.lab.comparison.grid import AUTO, Arm, Lane, Request
from engine.lab.comparison.race import ArmNotice, in_turn
from server.lab.bench.client import Client, Refused, read_json

_DRAFTED = "spec_decode_num_draft_tokens_per_pos_total"
_ACCEPTED = "spec_decode_num_accepted_tokens_per_pos_total"
_CHOSEN = "spec_decode_chosen_k_total"
# Beyond OpenAI's: what a server has to take is tried, one by one.
_SAME_WORK: dict[str, Any] = {"ignore_eos": True, "return_token_ids": True, "top_k": 0, "min_p": 0}
_NO_CACHE: dict[str, Any] = {"cache_salt": "bench", "cache_prompt": False}


class Served:
    """runs.Driver over HTTP. `as_it_is`: a Foredraft is not switched either. `fields` go into
    every request. Raises ConfigError when the server is not there or has no model."""

    def __init__(
        self,
        client: Client,
        *,
        model: str | None,
        admin_key: str | None,
        as_it_is: bool = False,
        fields: Mapping[str, Any] | None = None,
    ) -> None:
        self._client, self._admin_key = client, admin_key
        self._fields = dict(fields or {})
        self.url = client.url
        self.model = str(self._fields.get("model") or model or _first_model(client))
        self._found = None if as_it_is else _speculation(client)
        self.is_foredraft = self._found is not None
        self.facts = _version(client) if self.is_foredraft else {}
        self.exact = bool(self.facts.get("exact", self.facts.get("dtype") == "float32"))
        self._names = count()
        self._settling: Sequence[Lane] = ()
        self._present: Arm | None = None
        self._same_work: dict[str, Any] = {"ignore_eos": True, "return_token_ids": True}
        self._no_cache: dict[str, Any] = {"cache_salt": "bench"}
        self.left_out: list[str] = []
        if not self.is_foredraft:
            self._try_fields()

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
        if self.is_foredraft:
            self._switch(Arm("fixed", 1) if self.k_max else Arm("off"))
        with ThreadPoolExecutor(8) as pool:
            asked = [Request(prompt, 0.0, 0, 2) for prompt in prompts]
            list(pool.map(lambda request: self._complete(request, Reply(0, 0.0), 0.0, {}), asked))

    def first_tokens(self, arm: Arm, lanes: Sequence[Lane]) -> list[float]:
        """Of the first request of each lane, past the prefix cache where the server allows that."""
        self._switch(arm)
        firsts = [[Request(r.prompt, r.temperature, r.seed, 1)] for r, *_ in lanes]
        past = dict(self._no_cache)
        if "cache_salt" in past:
            past["cache_salt"] = f"bench-{next(self._names)}"
        return first_waits(self._work(firsts, past))

    def settle(self, arms: Sequence[Arm], lanes: Sequence[Lane]) -> None:
        self._settling = lanes

    def round(
        self, arms: Sequence[Arm], lanes: Sequence[Lane], notice: ArmNotice
    ) -> dict[Arm, Run]:
        return in_turn(self, arms, lanes, notice)

    def run(self, arm: Arm, lanes: Sequence[Lane]) -> Run:
        self._switch(arm)
        if arm == AUTO:
            self._work(self._settling, {})
        before = self._client.counters()
        run = self._work(lanes, {})
        if len({reply.lane for reply in run.replies if reply.arrivals}) < len(lanes):
            raise ConfigError(f"{self.url} answered with no text, so there is nothing to count")
        run.guesses = guesses(before, self._client.counters())
        return run

    def _switch(self, arm: Arm) -> None:
        if not arm.is_switched or arm == self._present:
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

    def _work(self, lanes: Sequence[Lane], more: dict[str, Any]) -> Run:
        """Every lane in a thread of its own, until all have nothing left."""
        if not lanes:
            return Run([])
        began = time.perf_counter()

        def ask(lane: int) -> list[Reply]:
            replies = []
            for request in lanes[lane]:
                reply = Reply(lane, time.perf_counter() - began)
                self._complete(request, reply, began, more)
                replies.append(reply)
            return replies

        with ThreadPoolExecutor(len(lanes)) as pool:
            found = list(pool.map(ask, range(len(lanes))))
        return Run([reply for replies in found for reply in replies])

    def _complete(self, request: Request, reply: Reply, began: float, more: dict[str, Any]) -> None:
        """Fill in arrivals and text. Raises ConfigError when nothing says how many tokens came."""
        ids: list[int] = []
        text, tokens = "", None
        for event in self._client.stream("/v1/completions", self._body(request, more)):
            now = time.perf_counter() - began
            for choice in event.get("choices") or []:
                got = choice.get("token_ids") or []
                ids += got
                text += choice.get("text") or ""
                if got or choice.get("text"):
                    reply.arrivals.append((now, len(got)))
            if event.get("usage"):
                tokens = event["usage"].get("completion_tokens")
        reply.text = ids or text
        if not ids and tokens is None:
            raise ConfigError(f"{self.url} sends no usage, so its tokens cannot be counted")
        if tokens is not None and tokens != len(ids):
            _spread(reply, tokens)

    def _body(self, request: Request, more: dict[str, Any]) -> dict[str, Any]:
        plain = {} if self.is_foredraft else {"top_p": 1.0}
        return {
            **plain,
            **self._same_work,
            **more,
            **self._fields,
            "model": self.model,
            "prompt": request.prompt,
            "max_tokens": request.tokens,
            "temperature": request.temperature,
            "seed": request.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def _try_fields(self) -> None:
        """Which of the fields beyond OpenAI's it takes, one by one; many servers ignore them."""
        self._same_work, self._no_cache = {}, {}
        self._complete(Request("x", 0.0, 0, 1), Reply(0, 0.0), 0.0, {})
        self._same_work = self._taken(_SAME_WORK)
        self._no_cache = self._taken(_NO_CACHE)
        given = {**self._same_work, **self._fields}
        self.left_out = [name for name in _SAME_WORK if name not in given]

    def _taken(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        taken = {}
        for name, value in fields.items():
            try:
                self._complete(Request("x", 0.0, 0, 1), Reply(0, 0.0), 0.0, {name: value})
            except Refused as error:
                if error.status not in (400, 422):
                    raise
            else:
                taken[name] = value
        return taken


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
    """GET /speculation of a Foredraft, None for any other server."""
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
