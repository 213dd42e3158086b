"""The comparison on running servers. One engine serves all modes, and its controller sees the other
arms' traffic too, so each turn of auto begins with a repetition of the previous round, uncounted.

POST /speculation switches a Foredraft server between modes and at the end restores the mode that it
was in. Any other server has one arm: as it is. It is asked for plain sampling and to ignore EOS, as
far as it accepts the fields for that. Its tokens are counted by their ids or by its usage, never by
its events.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from engine.errors import ConfigError
from engine.lab.comparison.figures import Reply, Run, StepSums
from engine.lab.comparison.workload import Arm, Lane, Request
from engine.messages import CONTEXTS
from server.lab.bench.client import Client, Counters, Refused

# Fields beyond OpenAI's; each is tried on the server, one by one.
_SAME_WORK: dict[str, Any] = {"ignore_eos": True, "return_token_ids": True, "top_k": 0, "min_p": 0}
_TRIAL = [[Request("x", 0.0, 0, 1)]]
_NO_CACHE: dict[str, Any] = {"cache_salt": "bench", "cache_prompt": False}


class Server:
    """One OpenAI-compatible server. `speculation`: the answer to GET /speculation of a Foredraft
    server; None for others and if `as_it_is`, and then its supported fields are tried, unless
    `fields` gives those of every request. `k_max`: the largest K that it can be switched to. Raises
    ConfigError if no server or model is there."""

    def __init__(
        self,
        client: Client,
        *,
        model: str | None = None,
        admin_key: str | None = None,
        as_it_is: bool = False,
        fields: Mapping[str, Any] | None = None,
        chat: bool = False,
    ) -> None:
        self._client, self._admin_key, self._chat = client, admin_key, chat
        self.url = client.url
        self.model = model or _first_model(client)
        self.speculation = None if as_it_is else _speculation(client)
        self.k_max = int(self.speculation["k_max"]) if self.speculation else 0
        self.version: dict[str, Any] = client.call("/version") if self.speculation else {}
        self.exact = bool(self.version.get("exact", self.version.get("dtype") == "float32"))
        self._salts = count()
        self._mode: Arm | None = None
        self._fields: Mapping[str, Any] = fields or {"ignore_eos": True, "return_token_ids": True}
        self._no_cache: Mapping[str, Any] = {"cache_salt": "bench"}
        self.left_out: list[str] = []
        if self.speculation is None and fields is None:
            self._try_fields()

    def switch(self, arm: Arm) -> None:
        """Switch the server to the mode of `arm`. Raises ConfigError if the server refuses."""
        if arm != self._mode:
            self._post({"mode": arm.mode, **({"k": arm.k} if arm.mode == "fixed" else {})})
            self._mode = arm

    def restore(self) -> None:
        """Switch the server back to the mode that it was in."""
        if self.speculation and self._mode is not None:
            found = self.speculation
            k = {"k": found["k"]} if found["mode"] == "fixed" else {}
            self._post({"mode": found["mode"], **k})

    def _post(self, body: dict[str, Any]) -> None:
        try:
            self._client.call("/speculation", body, key=self._admin_key)
        except Refused as error:
            hint = (
                "; --admin-key gives the server's admin key" if error.status in (401, 403) else ""
            )
            raise ConfigError(f"{error}{hint}") from None

    def warm(self, prompts: Sequence[str]) -> None:
        """Put the prompts into the prefix cache, of the draft too."""
        if self.speculation:
            self.switch(Arm("fixed", 1) if self.k_max else Arm("off"))
        requests = [Request(prompt, 0.0, 0, 2) for prompt in prompts]
        self._play([requests[lane::8] for lane in range(8)], {})

    def ask(self, lanes: Sequence[Lane], *, cold: bool) -> Run:
        """Run all requests of all lanes. `cold`: without the prefix cache, if the server supports
        that."""
        salt = (
            {"cache_salt": f"bench-{next(self._salts)}"} if "cache_salt" in self._no_cache else {}
        )
        before = self._client.counters()
        found = self._play(lanes, {**self._no_cache, **salt} if cold else {})
        if any(not any(reply.arrivals for reply in replies) for replies in found):
            raise ConfigError(f"{self.url} answered with no text, so there is nothing to count")
        replies = [reply for replies in found for reply in replies]
        return Run(replies, grown(before, self._client.counters()))

    def _play(self, lanes: Sequence[Lane], more: Mapping[str, Any]) -> list[list[Reply]]:
        """Run lanes concurrently, and the requests of each lane one after the other."""
        began = self._client.clock()

        async def play(lane: int) -> list[Reply]:
            return [await self._complete(request, more, lane, began) for request in lanes[lane]]

        async def all_lanes() -> list[list[Reply]]:
            return await asyncio.gather(*map(play, range(len(lanes))))

        return asyncio.run(all_lanes())

    async def _complete(
        self, request: Request, more: Mapping[str, Any], lane: int, began: float
    ) -> Reply:
        """Run one request. Raises ConfigError if the server does not report its token count."""
        reply = Reply(lane, request.seed, self._client.clock() - began)
        path, body = self._body(request)
        ids_of: dict[int, list[int]] = {}  # by choice
        text, tokens = "", None
        for at, event in await self._client.stream(path, {**body, **more}):
            for choice in event.get("choices") or []:
                token_ids = choice.get("token_ids") or []
                piece = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
                ids_of.setdefault(choice.get("index", 0), []).extend(token_ids)
                text += piece
                if token_ids or piece:
                    reply.arrivals.append((at - began, len(token_ids)))
            if event.get("usage"):
                tokens = event["usage"].get("completion_tokens")
        ids = [token for index in sorted(ids_of) for token in ids_of[index]]
        reply.text = ids or text
        if not ids and tokens is None:
            raise ConfigError(f"{self.url} sends no usage, so its tokens cannot be counted")
        if tokens is not None and tokens != len(ids):
            _spread(reply, tokens)
        return reply

    def _body(self, request: Request) -> tuple[str, dict[str, Any]]:
        """Return the path and the body of a request."""
        body = {
            **self._fields,
            "model": self.model,
            "max_tokens": request.tokens,
            "temperature": request.temperature,
            "seed": request.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if request.ends:
            body.pop("ignore_eos", None)
        if self._chat:
            messages = [{"role": "user", "content": request.prompt}]
            return "/v1/chat/completions", {**body, "messages": messages}
        return "/v1/completions", {**body, "prompt": request.prompt}

    def _try_fields(self) -> None:
        """Find the fields that the server accepts; many servers ignore those they do not know."""
        self._fields = {}
        self._play(_TRIAL, {})
        self._fields = {"top_p": 1.0, **self._taken(_SAME_WORK)}
        self._no_cache = self._taken(_NO_CACHE)
        self.left_out = [name for name in _SAME_WORK if name not in self._fields]

    def _taken(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        taken = {}
        for name, value in fields.items():
            try:
                self._play(_TRIAL, {name: value})
            except Refused as error:
                if error.status not in (400, 422):
                    raise
            else:
                taken[name] = value
        return taken


class Servers:
    """A race.Player that runs one arm after the other: the server of --url runs its own arms, each
    other server the arm named after it."""

    def __init__(self, own: Server, others: Mapping[Arm, Server]) -> None:
        self._own, self._others = own, others
        self.exact = own.exact
        self._before: Sequence[Lane] = ()

    def warm(self, prompts: Sequence[str]) -> None:
        for server in (self._own, *self._others.values()):
            server.warm(prompts)

    def round(
        self, arms: Sequence[Arm], lanes: Sequence[Lane], *, cold: bool = False
    ) -> dict[Arm, Run]:
        runs = {}
        for arm in arms:
            server = self._others.get(arm, self._own)
            if arm.is_mode:
                server.switch(arm)
            if arm.mode == "auto" and self._before and not cold:
                server.ask(self._before, cold=False)
            runs[arm] = server.ask(lanes, cold=cold)
        self._before = self._before if cold else lanes
        return runs


def grown(before: Counters, after: Counters) -> StepSums:
    """Return the growth of a server's speculation counters."""

    more = {key: count - before.get(key, 0.0) for key, count in after.items()}

    def of(name: str) -> list[float]:
        indices = [i for counter, i in more if counter == name and isinstance(i, int)]
        return [more.get((name, index), 0.0) for index in range(max(indices, default=-1) + 1)]

    def behind(what: str) -> list[float]:
        name = f"spec_decode_num_{what}_tokens_per_context_total"
        return [more.get((name, context), 0.0) for context in CONTEXTS]

    seconds = {part: s for (name, part), s in more.items() if name == "spec_decode_seconds_total"}
    return StepSums(
        of("spec_decode_num_draft_tokens_per_pos_total"),
        of("spec_decode_num_accepted_tokens_per_pos_total"),
        of("spec_decode_chosen_k_total"),
        behind("draft"),
        behind("accepted"),
        sum(seconds.values()),
        sum(seconds.values()) - seconds.get("host", 0.0),
    )


def _spread(reply: Reply, tokens: int) -> None:
    """Spread `tokens`, the server's count, evenly over deliveries of unknown size."""
    share, total = tokens / len(reply.arrivals or [0]), 0
    for index, (at, _) in enumerate(reply.arrivals):
        upto = round(share * (index + 1))
        reply.arrivals[index] = (at, upto - total)
        total = upto


def _first_model(client: Client) -> str:
    try:
        return str(client.call("/v1/models")["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise ConfigError(f"{client.url} lists no model at /v1/models") from None


def _speculation(client: Client) -> dict[str, Any] | None:
    """Return GET /speculation of a Foredraft server; None for any other server."""
    try:
        found = client.call("/speculation")
    except Refused as error:
        if error.status in (401, 403, 503):
            raise
        return None
    except ConfigError:
        return None  # not JSON
    is_ours = isinstance(found, dict) and found.get("object") == "speculation"
    return found if is_ours else None
