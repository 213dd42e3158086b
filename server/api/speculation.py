"""GET /speculation: what the controller believes and why it chose its K, with a page that shows it
live. POST: switch it, for the operator. Nothing here changes a text.

Estimates are those of the last step. A switch concerns every step that begins after it, so every
request that is sent after the reply, and outlives a restart of the engine.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from math import isfinite, nan
from pathlib import Path
from typing import Annotated, Any, get_args

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from pydantic import Field

from engine.messages import Estimates, Mode, Ready, SetSpeculation, mode_refusal
from server.api import replies
from server.api.auth import check_admin
from server.api.body import parse_json, read_body
from server.api.errors import ApiError, NotReady, invalid
from server.api.request import Part, shown
from server.api.routes import REFUSALS, refusals
from server.api.services import Services
from server.engine.lifecycle import NOT_READY
from server.observe.metrics_table import MAX_DEPTH
from server.observe.speculation import Gain


def came_of(gain: Gain) -> str:
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


def why(estimates: Estimates) -> str:
    """One or two sentences about the last choice."""
    if estimates.num_sequences == 0:
        return f"{_switched(estimates) or 'No step has been made yet.'}"
    return " ".join(
        filter(None, [_switched(estimates) or _reason(estimates), _evidence(estimates)])
    )


def _switched(estimates: Estimates) -> str:
    """Of a mode that the operator switched to."""
    match estimates.mode:
        case "fixed":
            return f"The operator fixed K at {estimates.k}."
        case "off":
            return "The operator switched speculation off."
        case _:
            return ""


def _reason(estimates: Estimates) -> str:
    k = estimates.k
    match estimates.reason:
        case "pays":
            return f"K = {k} promises the most tokens per second."
        case "off":
            return "No guesses promise the most tokens per second."
        case "probe":
            return f"K is 0, and a probe of {k} looks whether guesses would pay by now."
        case "trial":
            return f"K is 0, and a trial of {k} looks what guesses would cost and save by now."
        case "baseline":
            return "K is above 0, and this step plays K = 0 to compare."
        case "neighbour":
            return f"This step plays K = {k}, one off the present K, to compare."
        case "fixed":
            return f"The configuration fixes K at {k}."
        case _:
            return f"K is {k}."


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


logger = logging.getLogger(__name__)

MODES: tuple[Mode, ...] = get_args(Mode)
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
# FastAPI would read the body before the key is looked at.
SWITCH = {
    "security": [{"AdminKey": []}],
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": {"$ref": "#/components/schemas/SpeculationRequest"}}
        },
    },
}
DIGITS = 6  # that a figure of an estimate is worth


class SpeculationRequest(Part):
    """Described only: `read_switch` reads it, with the bound of the engine."""

    mode: Mode
    k: Annotated[int, Field(ge=1, le=MAX_DEPTH)] | None = None


def speculation_router(services: Services) -> APIRouter:
    router = APIRouter()
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
        openapi_extra=SWITCH,
    )
    async def switch(http: Request) -> Response:
        server = services.config.server
        check_admin(http.headers, key=server.admin_key, api_key=server.api_key)
        body = await read_body(http, server.max_body_bytes)
        ready = services.known()
        said = read_switch(parse_json(body), ready.k_max)
        if services.client.state in ("draining", "failed", "stopped"):
            raise NotReady(NOT_READY[services.client.state])
        services.client.set_speculation(said)
        logger.info("POST /speculation: K is to be %s", told(said))
        return JSONResponse(_present(services, ready))

    return router


def read_switch(given: Mapping[str, Any], k_max: int) -> SetSpeculation:
    """{"mode": "auto" | "fixed" | "off", "k": of `fixed`}. A null is as good as leaving the field
    out. Raises ApiError (400) that names the field."""
    given = {name: value for name, value in given.items() if value is not None}
    for name in given:
        if name not in ("mode", "k"):
            message = f"unknown field `{name[:64]}`; this route has `mode` and `k`"
            raise ApiError(400, message, param=name[:64], code="unknown_field")
    allowed = ", ".join(f'"{mode}"' for mode in MODES)
    if "mode" not in given:
        message = f"`mode` is required: one of {allowed}"
        raise ApiError(400, message, param="mode", code="missing_field")
    mode = given["mode"]
    if mode not in MODES:
        raise invalid("mode", f"`mode` must be one of {allowed}, but {shown(mode)} was given")
    said = SetSpeculation(mode, _k(mode, given.get("k"), k_max))
    refusal = mode_refusal(said, k_max)
    if refusal is not None:
        raise invalid(*refusal)
    return said


def _k(mode: Mode, k: object, k_max: int) -> int:
    if mode != "fixed":
        if k is not None:
            raise invalid("k", f'`k` is only allowed with `mode` "fixed", not with "{mode}"')
        return 0
    if k_max == 0:
        return 0  # refused for its mode
    bounds = f"an integer from 1 to {k_max}"
    if k is None:
        message = f'`k` is required with `mode` "fixed": {bounds}'
        raise ApiError(400, message, param="k", code="missing_field")
    if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= k_max:
        hint = '; for no guesses ask for `mode` "off"' if k == 0 and k is not False else ""
        raise invalid("k", f"`k` must be {bounds}, but {shown(k)} was given{hint}")
    return k


def _present(services: Services, ready: Ready) -> dict[str, Any]:
    """The mode as it was set and what it settles; what all guesses came to in it lately; the main
    proposer's part as of the last step. `reason` and `speedup` are null where nobody has chosen yet
    in the present mode."""
    said = services.client.speculation
    last = services.client.estimates or Estimates()
    estimated = bool(last.rates)
    obeyed = last.mode == said.mode and (said.mode != "fixed" or last.k == said.k)
    settled = None if said.mode == "auto" else said.mode
    k = last.k if said.mode == "auto" else said.k
    gain = services.metrics.gain if obeyed else Gain()
    chosen = why(last) if obeyed else f"From the next step on K is {told(said)}."
    return {
        "object": "speculation",
        "mode": said.mode,
        "controller": ready.controller,
        "proposer": ready.proposer,
        "k_max": ready.k_max,
        "k": k,
        "reason": last.reason if obeyed else settled,
        "explanation": " ".join(filter(None, [chosen, came_of(gain)])),
        "num_sequences": last.num_sequences,
        "speedup": _known(gain.speedup),
        "tokens_per_round": _known(gain.tokens_per_round),
        "by_proposer": _shares(gain),
        "acceptance": _figure(last.acceptance) if estimated else None,
        "kept": [_figure(share) for share in services.metrics.kept.shares],
        "survival": [_figure(chance) for chance in last.survival],
        "tokens_per_second": [_figure(rate) for rate in last.rates],
        "expected_speedup": _figure(last.speedup if obeyed else _expected(last, k))
        if estimated
        else None,
        "regret": _figure(services.metrics.regret.value) if estimated else None,
    }


def _shares(gain: Gain) -> dict[str, dict[str, float | None]]:
    return {
        name: {
            "proposed": _figure(share.proposed),
            "accepted": _figure(share.accepted),
            "share": _figure(share.tokens),
        }
        for name, share in gain.shares.items()
    }


def _expected(last: Estimates, k: int) -> float:
    rates = last.rates
    return rates[k] / rates[0] if k < len(rates) and rates[0] else nan


def told(said: SetSpeculation) -> str:
    """Completes "K is ..."."""
    match said.mode:
        case "fixed":
            return f"fixed at {said.k}"
        case "off":
            return "0 for everybody"
        case _:
            return "chosen by the configured controller"


def _known(value: float | None) -> float | None:
    return None if value is None else _figure(value)


def _figure(value: float) -> float | None:
    """JSON has no word for what is not finite."""
    return float(f"{value:.{DIGITS}g}") if isfinite(value) else None
