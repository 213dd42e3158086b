"""GET and POST /speculation: who may switch, how errors name fields, what replies report."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import httpx
import jsonschema
import pytest

from engine.errors import EngineLost
from engine.messages import (
    Estimates,
    SetSpeculation,
    StepMetrics,
    StepSeconds,
    Swap,
    SwapOutcome,
)
from tests.support.fake_client import FakeClient, make_ready
from tests.support.serving import Served, description, serve

DOCUMENT = description()
ADMIN, CLIENT = "sk-admin", "sk-client"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve(admin_key=ADMIN) as served:
        yield served


@pytest.fixture
def http(served: Served) -> Iterator[httpx.Client]:
    served.client.set_speculation(SetSpeculation("auto"))
    with served.http(headers=bearer(ADMIN)) as http:
        yield http


@pytest.mark.parametrize(
    ("body", "sent"),
    [
        ({"mode": "off"}, SetSpeculation("off")),
        ({"mode": "fixed", "k": 3}, SetSpeculation("fixed", 3)),
        ({"mode": "fixed", "k": 4}, SetSpeculation("fixed", 4)),
        ({"mode": "auto", "k": None}, SetSpeculation("auto")),
    ],
)
def test_a_switch_reaches_the_engine(
    http: httpx.Client, served: Served, body: dict[str, Any], sent: SetSpeculation
) -> None:
    """Law: the engine gets the requested mode, and the reply reports it."""
    reply = http.post("/speculation", json=body)
    assert reply.status_code == 200
    assert served.client.speculation == sent
    assert reply.json()["mode"] == http.get("/speculation").json()["mode"] == body["mode"]
    served.client.estimates = Estimates(mode="fixed", k=1, reason="fixed", num_sequences=1)
    state = http.get("/speculation").json()
    assert state["explanation"].startswith("From the next step on")
    assert state["k"] == (1 if body["mode"] == "auto" else sent.k), "so that it can be restored"
    served.client.estimates = None


@pytest.mark.parametrize(
    ("before", "body", "expected"),
    [
        (Estimates(k=2, reason="pays"), {"mode": "off"}, ("off", 0, 1.0)),
        (Estimates(k=2, reason="pays"), {"mode": "fixed", "k": 1}, ("fixed", 1, 1.5)),
        (Estimates(k=2, reason="pays"), {"mode": "fixed", "k": 4}, ("fixed", 4, None)),
        (Estimates(mode="off"), {"mode": "fixed", "k": 2}, ("fixed", 2, 1.25)),
        (Estimates(mode="off"), {"mode": "auto"}, (None, 0, 1.0)),
        (Estimates(mode="fixed", k=1, reason="fixed"), {"mode": "off"}, ("off", 0, 1.0)),
        (Estimates(k=2, reason="pays", speedup=1.25), {"mode": "auto"}, ("pays", 2, 1.25)),
    ],
)
def test_a_switch_of_an_idle_engine_is_reported_at_once(
    http: httpx.Client, served: Served, before: Estimates, body: dict[str, Any], expected: Any
) -> None:
    """Bug: reason and speed-up were those of the last step, which ran in the previous mode."""
    before.rates = [100.0, 150.0, 125.0]
    served.client.estimates = before
    http.post("/speculation", json=body)
    now = http.get("/speculation").json()
    served.client.estimates = None
    assert (now["reason"], now["k"], now["expected_speedup"]) == expected


@pytest.mark.parametrize(
    ("body", "param", "word"),
    [
        ({}, "mode", "required"),
        ({"mode": "fast"}, "mode", '"auto", "fixed" or "off"'),
        ({"mode": 1}, "mode", "1 was given"),
        ({"mode": ["off"]}, "mode", "a list of 1"),
        ({"mode": None, "k": 2}, "mode", "required"),
        ({"mode": "fixed"}, "k", "from 1 to 4"),
        ({"mode": "fixed", "k": 0}, "k", 'use `mode` "off"'),
        ({"mode": "fixed", "k": 5}, "k", "5 was given"),
        ({"mode": "fixed", "k": -1}, "k", "-1 was given"),
        ({"mode": "fixed", "k": 10**400}, "k", "out of range"),
        ({"mode": "fixed", "k": 2.0}, "k", "2.0 was given"),
        ({"mode": "fixed", "k": True}, "k", "true was given"),
        ({"mode": "fixed", "k": "2"}, "k", 'but "2" was given'),
        ({"mode": "off", "k": 0}, "k", 'not with "off"'),
        ({"mode": "auto", "k": 2}, "k", 'not with "auto"'),
        ({"mode": "off", "K": 2}, "K", "unknown field"),
        ({"mode": "off", "model": "x"}, "model", "unknown field"),
        ({"draft": "x", "mode": "off"}, "draft", "without `mode`"),
        ({"draft": "x", "k": 2}, "draft", "without `mode`"),
        ({"draft": ""}, "draft", "an empty string was given"),
        ({"draft": "x" * 513}, "draft", "a string of 513 characters"),
        ({"draft": "a\0b"}, "draft", "folder"),
        ({"draft": 1}, "draft", "1 was given"),
        ({"draft": ["x"]}, "draft", "a list of 1"),
    ],
)
def test_a_wrong_switch_is_a_400_that_names_the_field(
    http: httpx.Client, served: Served, body: dict[str, Any], param: str, word: str
) -> None:
    """Law: nothing is switched."""
    reply = http.post("/speculation", json=body)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param)
    assert word in error["message"]
    assert served.client.speculation == SetSpeculation("auto")


@pytest.mark.parametrize("body", [b"", b"[]", b"off", b"\xff", b'{"mode": "off"'])
def test_a_body_that_is_no_object_is_a_400(http: httpx.Client, body: bytes) -> None:
    assert http.post("/speculation", content=body).status_code == 400


@pytest.mark.parametrize(
    ("server", "key", "status", "code"),
    [
        ({}, None, 403, "no_admin_key"),
        ({}, "anything", 403, "no_admin_key"),
        ({"api_key": CLIENT}, CLIENT, 403, "no_admin_key"),
        ({"api_key": CLIENT}, None, 401, "invalid_api_key"),
        ({"admin_key": ADMIN}, None, 401, "invalid_api_key"),
        ({"admin_key": ADMIN}, "wrong", 401, "invalid_api_key"),
        ({"admin_key": ADMIN, "api_key": CLIENT}, CLIENT, 403, "not_admin"),
        ({"admin_key": ADMIN, "api_key": CLIENT}, "wrong", 401, "invalid_api_key"),
        ({"admin_key": ADMIN, "api_key": CLIENT}, ADMIN, 200, None),
    ],
)
def test_only_the_operator_switches(
    server: dict[str, Any], key: str | None, status: int, code: str | None
) -> None:
    """Law: without an admin key it is closed; a client key does not open it; no reply has a key."""
    with serve(**server) as served:
        headers = {} if key is None else bearer(key)
        reply = httpx.post(f"{served.url}/speculation", json={"mode": "off"}, headers=headers)
        assert reply.status_code == status
        assert reply.json().get("error", {}).get("code") == code
        assert (served.client.speculation.mode == "off") == (status == 200)
        assert not any(secret in reply.text for secret in (ADMIN, CLIENT))


def test_the_admin_key_opens_the_rest_too() -> None:
    with serve(admin_key=ADMIN, api_key=CLIENT) as served:
        for key, status in ((ADMIN, 200), (CLIENT, 200), ("wrong", 401)):
            reply = httpx.get(f"{served.url}/speculation", headers=bearer(key))
            assert reply.status_code == status


def test_a_server_without_draft_tokens_has_no_k_to_fix() -> None:
    with serve(FakeClient(ready=make_ready(k_max=0)), admin_key=ADMIN) as served:
        url = f"{served.url}/speculation"
        reply = httpx.post(url, json={"mode": "fixed", "k": 1}, headers=bearer(ADMIN))
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "mode")
        assert httpx.post(url, json={"mode": "off"}, headers=bearer(ADMIN)).status_code == 200


@pytest.mark.parametrize("state", ["draining", "failed", "stopped"])
def test_an_engine_that_ends_is_not_switched(state: Any) -> None:
    with serve(FakeClient(state=state), admin_key=ADMIN) as served:
        url = f"{served.url}/speculation"
        assert httpx.post(url, json={"mode": "off"}, headers=bearer(ADMIN)).status_code == 503
        assert httpx.get(url).status_code == 200


def test_a_switch_of_a_lost_engine_applies_to_the_next() -> None:
    with serve(FakeClient(state="lost"), admin_key=ADMIN) as served:
        url = f"{served.url}/speculation"
        assert httpx.post(url, json={"mode": "off"}, headers=bearer(ADMIN)).status_code == 200
        assert served.client.speculation.mode == "off"


def test_before_the_engine_was_ever_ready() -> None:
    client = FakeClient(state="starting")
    client.ready = None
    with serve(client, admin_key=ADMIN) as served:
        url = f"{served.url}/speculation"
        assert httpx.get(url).status_code == 503
        assert httpx.post(url, json={"mode": "off"}, headers=bearer(ADMIN)).status_code == 503


def test_estimates_are_reported_with_their_reason(http: httpx.Client, served: Served) -> None:
    """Law: known figures are reported, others are null, and no odd number breaks the reply."""
    empty = http.get("/speculation").json()
    assert (empty["k"], empty["acceptance"], empty["survival"]) == (0, None, [])
    assert empty["explanation"] == "No step has run yet."
    served.client.estimates = Estimates(
        k=2, reason="pays", acceptance=0.8123456789, survival=[0.8, 0.7], num_sequences=1,
        rates=[100.0, 150.0, float("inf")], speedup=float("nan"),
    )  # fmt: skip
    state = http.get("/speculation").json()
    assert state["acceptance"] == 0.812346
    assert state["tokens_per_second"] == [100.0, 150.0, None]
    assert state["expected_speedup"] is None
    assert (state["k"], state["reason"], state["k_max"]) == (2, "pays", 4)
    assert state["explanation"] == "K = 2 has the highest expected tokens per second."
    served.client.estimates = None


def test_the_measured_speedup_is_reported_beside_the_expected_one() -> None:
    """Bug: with n-gram look-ups before the draft, a reader saw the draft's expected speed-up only:
    1.2 instead of 2.5. Law: after a switch nothing of the previous mode is reported."""
    estimates = Estimates(k=2, reason="pays", rates=[100.0, 110.0, 120.0], speedup=1.2)
    step = StepMetrics(
        seconds=StepSeconds(verify=0.01),
        num_sampling=1,
        num_generated_tokens=4,
        num_proposed=4,
        plain_seconds=0.025,
        by_proposer={"ngram": (4, 3)},
        estimates=estimates,
    )
    with serve(admin_key=ADMIN) as served:
        url = f"{served.url}/speculation"
        served.client.estimates = estimates
        served.metrics.observe_step(step)
        state = httpx.get(url).json()
        assert (state["speedup"], state["expected_speedup"]) == (2.5, 1.2)
        assert state["tokens_per_round"] == 4.0
        assert state["by_proposer"] == {"ngram": {"proposed": 4.0, "accepted": 3.0, "share": 0.75}}
        schema = {"$ref": "#/components/schemas/Speculation", "components": DOCUMENT["components"]}
        jsonschema.validate(state, schema)
        state = httpx.post(url, json={"mode": "off"}, headers=bearer(ADMIN)).json()
        assert state["speedup"] is state["tokens_per_round"] is None
        assert (state["by_proposer"], state["expected_speedup"]) == ({}, 1.0)


class Swapping(FakeClient):
    """The draft's name decides the outcome of its swap, at once or when it is released."""

    OUTCOMES: ClassVar[dict[str, SwapOutcome]] = {"good": "trial", "slow": "trial"}

    async def swap_draft(self, path: str) -> Swap:
        if path == "lost":
            raise EngineLost("the engine was lost")
        self.loading = path
        while path == "slow" and self.loading:
            await asyncio.sleep(0.01)
        outcome, self.loading = self.OUTCOMES.get(path, "refused"), ""
        running = "demo" if outcome == "refused" else path
        self.swap = Swap(path, outcome, f"the draft model {path!r} is so", running)
        return self.swap


def test_a_draft_swap_is_answered_by_its_outcome() -> None:
    """Law: a draft on trial is reported as the running one; a refused one is a 400 with the
    engine's message; a second swap meanwhile is a 409; later replies report the trial's outcome."""
    client = Swapping(ready=make_ready(draft="demo"))
    with serve(client, admin_key=ADMIN) as served:
        url = f"{served.url}/speculation"

        def post(draft: str, **more: Any) -> httpx.Response:
            return httpx.post(url, json={"draft": draft, **more}, headers=bearer(ADMIN))

        state = httpx.get(url).json()
        assert (state["draft"], state["swap"]) == ("demo", None)
        state = post("good").json()
        schema = {"$ref": "#/components/schemas/Speculation", "components": DOCUMENT["components"]}
        jsonschema.validate(state, schema)
        assert (state["draft"], state["swap"]["outcome"]) == ("good", "trial")
        reply = post("bad")
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "draft"
        assert reply.json()["error"]["message"] == "the draft model 'bad' is so"
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(post, "slow")
            served.until(lambda: client.loading == "slow")
            assert httpx.get(url).json()["swap"]["outcome"] == "loading"
            reply = post("good")
            assert (reply.status_code, reply.json()["error"]["code"]) == (409, "swap_under_way")
            assert post("x", mode="off").status_code == 400
            client.loading = ""
            assert first.result().status_code == 200
        client.swap = Swap("slow", "taken_back", "it is worse", "demo")
        state = httpx.post(url, json={"mode": "auto"}, headers=bearer(ADMIN)).json()
        assert (state["draft"], state["swap"]["outcome"]) == ("demo", "taken_back")
        assert state["swap"]["message"] == "it is worse"
        assert post("lost").status_code == 503
        assert httpx.post(url, json={"draft": "good"}).status_code == 401


REQUEST = DOCUMENT["components"]["schemas"]["SpeculationRequest"]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"mode": "fast"},
        {"mode": "off", "x": 1},
        {"mode": "off"},
        {"mode": "auto", "k": None},
        {"draft": "x", "mode": "off"},
        {"draft": "x", "k": 1},
        {"draft": None},
        {"draft": ""},
        *({"mode": "fixed", "k": k} for k in (0, 1, 4, 5, "2", True)),
    ],
)
def test_the_description_admits_what_is_admitted(
    http: httpx.Client, served: Served, body: dict[str, Any]
) -> None:
    """Law: /openapi.json, bound on K included, and the route agree; it also fits the replies."""
    served.client.estimates = Estimates(k=1, reason="pays", rates=[1.0, 2.0], survival=[0.5])
    reply = http.post("/speculation", json=body)
    served.client.estimates = None
    admitted = jsonschema.Draft202012Validator(REQUEST).is_valid(body)
    assert admitted == (reply.status_code == 200)
    name = "Speculation" if admitted else "Error"
    schema = {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}
    jsonschema.validate(reply.json(), schema)


@pytest.mark.parametrize("server", [{}, {"admin_key": ADMIN}])
def test_other_methods_get_all_allowed_ones(server: dict[str, Any]) -> None:
    """Bug: Allow named GET only, the first route of that path."""
    with serve(**server) as served:
        reply = httpx.delete(f"{served.url}/speculation", headers=bearer(ADMIN))
        assert reply.status_code == 405
        assert reply.headers["allow"] == "GET, HEAD, POST"
        assert "GET, HEAD, POST" in reply.json()["error"]["message"]


def test_before_the_first_step_nothing_is_measured(http: httpx.Client, served: Served) -> None:
    """Bug: acceptance and speed-up were reported before anything was generated."""
    served.client.estimates = Estimates()
    state = http.get("/speculation").json()
    served.client.estimates = None
    assert state["acceptance"] is state["expected_speedup"] is state["regret"] is None
    assert state["speedup"] is state["tokens_per_round"] is None
    assert state["by_proposer"] == {}
    assert state["survival"] == state["tokens_per_second"] == []
    assert state["explanation"] == "No step has run yet."
