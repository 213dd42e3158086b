"""GET /speculation: the controller's estimates and why it chose its K. POST: the operator switches
the mode or the draft model. Neither changes any text.

Estimates are those of the last step. A switch applies to every step that begins after it, so to
every request that is sent after the reply, and it survives a restart of the engine.
"""

from __future__ import annotations

import logging
from math import isfinite, nan
from typing import Annotated

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import ConfigDict, Field

from engine.messages import Estimates, Mode, Ready, Reason, SetSpeculation, mode_refusal
from server.api import replies
from server.api.auth import check_admin
from server.api.errors import ApiError, invalid, missing
from server.api.fields import Schema, described
from server.api.limits import MAX_LABEL_LENGTH
from server.api.request import RequestBody, Source, wrong
from server.api.routes import REFUSALS, BodyRouter, refusals
from server.api.services import Services
from server.engine.client import EngineClient
from server.observe.speculation import Gain, Share

logger = logging.getLogger(__name__)

SWITCH_REFUSALS = {status: REFUSALS[status] for status in (400, 408, 413, 415, 503)} | refusals(
    {
        401: "the admin key is missing or wrong",
        403: "this server has no admin key, or the key is a client's",
        409: "another draft model is being loaded",
    }
)
DIGITS = 6  # significant digits of an estimate
DraftLength = Annotated[int, Field(title="DraftLength", json_schema_extra={"minimum": 1})]


DraftPath = Annotated[Source, Field(max_length=MAX_LABEL_LENGTH, pattern=r"^[^\x00]*$")]
_A_MODE: Schema = {
    "required": ["mode"],
    "properties": {"mode": {"type": "string"}, "draft": {"type": "null"}},
}
_A_DRAFT: Schema = {
    "required": ["draft"],
    "properties": {"draft": {"type": "string"}, "mode": {"type": "null"}, "k": {"type": "null"}},
}


class SpeculationRequest(RequestBody):
    model_config = ConfigDict(json_schema_extra={"anyOf": [_A_MODE, _A_DRAFT]})

    mode: Mode | None = described(
        None, "What chooses K: the configured controller, or the operator."
    )
    k: DraftLength | None = described(
        None,
        "The K of every step.",
        'an integer from 1 to the server\'s K, and only with `mode` "fixed" (to disable'
        ' speculation use `mode` "off")',
    )
    draft: DraftPath | None = described(
        None,
        "Another draft model, to be loaded beside the running one and to replace it.",
        "a model's folder or hub name, without `mode` and `k`",
    )

    def switch(self, k_max: int) -> SetSpeculation:
        """Return the mode to set. Raises ApiError (400) if `k_max` does not allow it."""
        if self.mode is None:
            raise missing("mode", f"{self.rows()['mode'].allowed} (or give a `draft`)")
        if self.mode != "fixed" and self.k is not None:
            raise invalid("k", f'is only allowed with `mode` "fixed", not with "{self.mode}"')
        allowed = f'an integer from 1 to {k_max} (to disable speculation use `mode` "off")'
        if self.mode == "fixed" and k_max > 0:
            if self.k is None:
                raise missing("k", f'{allowed}, with `mode` "fixed"')
            if not 1 <= self.k <= k_max:
                raise wrong("k", allowed, self.k)
        command = SetSpeculation(self.mode, self.k or 0)
        if (refusal := mode_refusal(command, k_max)) is not None:
            param, sentence = refusal
            raise ApiError(400, sentence, param=param, code="invalid_value")
        return command


def speculation_router(services: Services) -> APIRouter:
    server = services.config.server

    def guard(http: Request) -> None:
        check_admin(http.headers, keyring=services.keyring, key=server.admin_key)

    router = BodyRouter(services, guard=guard)

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
        if request.draft is not None:
            await _swap(services, request.draft, alone=request.mode is None and request.k is None)
            return JSONResponse(_present(services, ready))
        command = request.switch(ready.k_max)
        if services.client.state in ("draining", "failed", "stopped"):
            raise services.client.not_ready()
        services.client.set_speculation(command)
        logger.info("POST /speculation: K is to be %s", _in_words(command))
        return JSONResponse(_present(services, ready))

    return router


async def _swap(services: Services, path: str, *, alone: bool) -> None:
    """Swap the draft; return when it is on trial. Raises ApiError (400, 409) or EngineLost."""
    client = services.client
    if not alone:
        raise invalid("draft", "is only allowed without `mode` and `k`")
    if client.loading:
        message = f"the draft model {client.loading!r} is being loaded; try again once it is loaded"
        raise ApiError(409, message, param="draft", code="swap_under_way")
    logger.info("POST /speculation: the draft model %r is to be loaded", path)
    found = await client.swap_draft(path)
    if found.outcome == "refused":
        raise ApiError(400, found.message, param="draft", code="draft_refused")


REASONS: dict[Reason, str] = {
    "pays": "K = {k} has the highest expected tokens per second.",
    "off": "K = 0 has the highest expected tokens per second.",
    "probe": "K is 0; some sequences draft {k} tokens to test whether speculation pays now.",
    "trial": "K is 0; all sequences draft {k} tokens to measure what speculation costs and saves.",
    "baseline": "K is above 0; this step uses K = 0 as a baseline.",
    "fixed": "The configuration fixes K at {k}.",
}
SWITCHED: dict[Mode, str] = {
    "fixed": "The operator fixed K at {k}.",
    "off": "The operator switched speculation off.",
}


def choice_sentence(estimates: Estimates) -> str:
    """Return the sentence that says why the last K was chosen."""
    reason = REASONS[estimates.reason] if estimates.num_sequences else "No step has run yet."
    return SWITCHED.get(estimates.mode, reason).format(k=estimates.k)


def _present(services: Services, ready: Ready) -> replies.Speculation:
    """Return the reply: the mode that is set and its K, the recent gain of all proposals in that
    mode, and the main proposer's estimates as of the last step. `reason` (except a fixed mode's)
    and `speedup` are null until a step has used the mode."""
    command, metrics = services.client.speculation, services.metrics
    last = services.client.estimates or Estimates()
    obeyed = last.mode == command.mode and (command.mode != "fixed" or last.k == command.k)
    k = last.k if command.mode == "auto" else command.k
    gain = metrics.gain if obeyed else Gain()
    reply: replies.Speculation = {
        "object": "speculation",
        "mode": command.mode,
        "controller": ready.controller,
        "proposer": ready.proposer,
        "k_max": ready.k_max,
        "k": k,
        "reason": last.reason,
        "explanation": choice_sentence(last),
        "num_sequences": last.num_sequences,
        "speedup": _figure(gain.speedup),
        "tokens_per_round": _figure(gain.tokens_per_round),
        "by_proposer": {name: _share(share) for name, share in gain.shares.items()},
        "acceptance": _figure(last.acceptance),
        "kept": [_figure(share) for share in gain.acceptance_by_position],
        "kept_by_context": {n: _figure(share) for n, share in gain.acceptance_by_context.items()},
        "survival": [_figure(chance) for chance in last.survival],
        "tokens_per_second": [_figure(rate) for rate in last.rates],
        "expected_speedup": _figure(last.speedup if obeyed else _expected(last, k)),
        "regret": _figure(metrics.regret.value),
        "draft": (services.client.swap.running if services.client.swap else ready.draft) or None,
        "swap": _swapped(services.client),
    }
    if not obeyed:
        reply["reason"] = None if command.mode == "auto" else command.mode
        reply["explanation"] = f"From the next step on K is {_in_words(command)}."
    if not last.rates:  # nothing is estimated yet
        reply["acceptance"] = reply["expected_speedup"] = reply["regret"] = None
    return reply


def _swapped(client: EngineClient) -> replies.Swapped | None:
    """Return the draft that was requested last and the outcome of its swap."""
    if client.loading:
        message = "it is loaded, checked and compiled; the running draft stays in use meanwhile"
        return {"draft": client.loading, "outcome": "loading", "message": message}
    if (last := client.swap) is None:
        return None
    return {"draft": last.draft, "outcome": last.outcome, "message": last.message}


def _share(share: Share) -> replies.Share:
    return {
        "proposed": _figure(share.proposed),
        "accepted": _figure(share.accepted),
        "share": _figure(share.tokens),
    }


def _expected(last: Estimates, k: int) -> float:
    rates = last.rates
    return rates[k] / rates[0] if k < len(rates) and rates[0] else nan


def _in_words(command: SetSpeculation) -> str:
    """Return the words that complete "K is ..."."""
    match command.mode:
        case "fixed":
            return f"fixed at {command.k}"
        case "off":
            return "0 for all requests"
        case _:
            return "chosen by the configured controller"


def _figure(value: float | None) -> float | None:
    """Round an estimate to DIGITS; one that is not finite, which JSON cannot express, is None."""
    return None if value is None or not isfinite(value) else float(f"{value:.{DIGITS}g}")
