"""GET /speculation: what the controller believes and why it chose its K, with a page that shows it
live. POST: switch it, for the operator. Nothing here changes a text.

Estimates are those of the last step. A switch concerns every step that begins after it, so every
request that is sent after the reply, and outlives a restart of the engine.
"""

from __future__ import annotations

import logging
from math import isfinite, nan
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from pydantic import Field

from engine.messages import Estimates, Mode, Ready, Reason, SetSpeculation, mode_refusal
from server.api import replies
from server.api.auth import check_admin
from server.api.errors import NotReady, invalid, missing
from server.api.request import RequestBody, wrong
from server.api.routes import REFUSALS, BodyRouter, refusals
from server.api.services import Services
from server.engine.lifecycle import NOT_READY
from server.observe.speculation import Gain

logger = logging.getLogger(__name__)

PAGE = Path(__file__).parents[1] / "pages" / "speculation.html"
ITSELF = {  # it loads nothing, speaks to this server only, and nobody may frame it
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline';"
    " script-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; frame-ancestors 'none'"
}
SWITCH_REFUSALS = {status: REFUSALS[status] for status in (400, 408, 413, 415, 503)} | refusals(
    {
        401: "the admin key is missing or wrong",
        403: "this server has no admin key, or the key is a client's",
    }
)
DIGITS = 6  # that a figure of an estimate is worth


class SpeculationRequest(RequestBody):
    endpoint = "speculation"

    mode: Mode
    k: Annotated[int, Field(json_schema_extra={"minimum": 1})] | None = None

    def switch(self, k_max: int) -> SetSpeculation:
        """Raises ApiError (400) for what an engine with this bound on K cannot do."""
        if self.mode != "fixed" and self.k is not None:
            raise invalid("k", f'`k` is only allowed with `mode` "fixed", not with "{self.mode}"')
        allowed = f'an integer from 1 to {k_max} (for no guesses ask for `mode` "off")'
        if self.mode == "fixed" and k_max > 0:
            if self.k is None:
                raise missing("k", f'{allowed}, with `mode` "fixed"')
            if not 1 <= self.k <= k_max:
                raise wrong("k", allowed, self.k)
        asked = SetSpeculation(self.mode, self.k or 0)
        if (refusal := mode_refusal(asked, k_max)) is not None:
            raise invalid(*refusal)
        return asked


def speculation_router(services: Services) -> APIRouter:
    server = services.config.server

    def guard(http: Request) -> None:
        check_admin(http.headers, key=server.admin_key, api_key=server.api_key)

    router = BodyRouter(services, guard=guard)
    page = PAGE.read_text(encoding="utf-8")

    @router.get("/speculation/live", response_class=HTMLResponse)
    async def live() -> Response:
        return HTMLResponse(page, headers=ITSELF)

    @router.get(
        "/speculation",
        response_model=replies.Speculation,
        responses=refusals({503: "the engine was never ready"}),
    )
    async def read() -> Response:
        return JSONResponse(_present(services, services.known()))

    @router.post(
        "/speculation",
        response_model=replies.Speculation,
        responses=SWITCH_REFUSALS,
        openapi_extra={"security": [{"AdminKey": []}]},
    )
    async def switch(http: Request, request: SpeculationRequest) -> Response:
        ready = services.known()
        asked = request.switch(ready.k_max)
        if services.client.state in ("draining", "failed", "stopped"):
            raise NotReady(NOT_READY[services.client.state])
        services.client.set_speculation(asked)
        logger.info("POST /speculation: K is to be %s", _in_words(asked))
        return JSONResponse(_present(services, ready))

    return router


def gain_sentence(gain: Gain) -> str:
    """What all guesses together came to lately, and whose they were; empty before the first."""
    if not gain.tokens_per_round:
        return ""
    shares = sorted(gain.shares.items(), key=lambda pair: -pair[1].tokens)
    if not shares:
        return "Lately nothing was guessed."
    said = f"Lately {gain.tokens_per_round:.2f} tokens a request and step"
    if gain.speedup is not None:
        said += f", {gain.speedup:.2f} times as fast as without any guesses"
    parts = [f"{100 * share.tokens:.0f} by {name}" for name, share in shares]
    return f"{said}; of 100 tokens guessed {', '.join(parts)}."


REASONS: dict[Reason, str] = {
    "pays": "K = {k} promises the most tokens per second.",
    "off": "No guesses promise the most tokens per second.",
    "probe": "K is 0, and a probe of {k} looks whether guesses would pay by now.",
    "trial": "K is 0, and a trial of {k} looks what guesses would cost and save by now.",
    "baseline": "K is above 0, and this step plays K = 0 to compare.",
    "fixed": "The configuration fixes K at {k}.",
}
SWITCHED: dict[Mode, str] = {
    "fixed": "The operator fixed K at {k}.",
    "off": "The operator switched speculation off.",
}


def choice_sentence(estimates: Estimates) -> str:
    """One or two sentences about the last choice."""
    nothing_yet = estimates.num_sequences == 0
    reason = "No step has been made yet." if nothing_yet else REASONS[estimates.reason]
    chosen = SWITCHED.get(estimates.mode, reason).format(k=estimates.k)
    evidence = "" if nothing_yet else _evidence(estimates)
    return f"{chosen} {evidence}".strip()


def _evidence(estimates: Estimates) -> str:
    """What was compared."""
    rates, k = estimates.rates, estimates.k
    if k >= len(rates):
        return ""
    plural = "s" if estimates.num_sequences != 1 else ""
    said = f"Expected of the main proposer for {estimates.num_sequences} sequence{plural}:"
    said += f" {rates[k]:.0f} tokens/s"
    if k:
        said += f", {estimates.speedup:.2f} times those of K = 0 ({rates[0]:.0f})"
    others = [other for other in range(1, len(rates)) if other != k]
    if others:
        best = max(others, key=rates.__getitem__)
        said += f"; the best other K above 0 is {best} ({rates[best]:.0f})"
    return said + "."


def _present(services: Services, ready: Ready) -> replies.Speculation:
    """The mode as it was set and what it settles; what all guesses came to in it lately; the main
    proposer's part as of the last step. `reason` and `speedup` are null where nobody has chosen yet
    in the present mode."""
    asked = services.client.speculation
    last = services.client.estimates or Estimates()
    estimated = bool(last.rates)
    obeyed = last.mode == asked.mode and (asked.mode != "fixed" or last.k == asked.k)
    settled = None if asked.mode == "auto" else asked.mode
    k = last.k if asked.mode == "auto" else asked.k
    gain = services.metrics.gain if obeyed else Gain()
    chosen = choice_sentence(last) if obeyed else f"From the next step on K is {_in_words(asked)}."
    return {
        "object": "speculation",
        "mode": asked.mode,
        "controller": ready.controller,
        "proposer": ready.proposer,
        "k_max": ready.k_max,
        "k": k,
        "reason": last.reason if obeyed else settled,
        "explanation": " ".join(filter(None, [chosen, gain_sentence(gain)])),
        "num_sequences": last.num_sequences,
        "speedup": _figure(gain.speedup),
        "tokens_per_round": _figure(gain.tokens_per_round),
        "by_proposer": {
            name: {
                "proposed": _figure(share.proposed),
                "accepted": _figure(share.accepted),
                "share": _figure(share.tokens),
            }
            for name, share in gain.shares.items()
        },
        "acceptance": _figure(last.acceptance) if estimated else None,
        "kept": [_figure(share) for share in gain.kept],
        "survival": [_figure(chance) for chance in last.survival],
        "tokens_per_second": [_figure(rate) for rate in last.rates],
        "expected_speedup": _figure(last.speedup if obeyed else _expected(last, k))
        if estimated
        else None,
        "regret": _figure(services.metrics.regret.value) if estimated else None,
    }


def _expected(last: Estimates, k: int) -> float:
    rates = last.rates
    return rates[k] / rates[0] if k < len(rates) and rates[0] else nan


def _in_words(asked: SetSpeculation) -> str:
    """Completes "K is ..."."""
    match asked.mode:
        case "fixed":
            return f"fixed at {asked.k}"
        case "off":
            return "0 for everybody"
        case _:
            return "chosen by the configured controller"


def _figure(value: float | None) -> float | None:
    """JSON has no word for what is not finite."""
    return None if value is None or not isfinite(value) else float(f"{value:.{DIGITS}g}")
