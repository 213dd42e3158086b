"""/v1/capabilities agrees with the table of fields and, under settings, with real replies."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from server.api import limits
from server.api.field_table import ROWS
from server.text.tokenizer import Tokenizer
from tests.api.test_fields import BODIES, PATHS, good_body
from tests.support.byte_tokenizer import ByteTokenizer
from tests.support.fake_client import FakeClient
from tests.support.serving import MODEL, Served, serve

SETTINGS: dict[str, Tokenizer] = {
    "all": ByteTokenizer(reads=("enable_thinking", "reasoning_effort")),
    "no chat template": ByteTokenizer(chat=None),
    "no fill-in-the-middle": ByteTokenizer(fim=False),
}


def capabilities(served: Served) -> Any:
    reply = httpx.get(f"{served.url}/v1/capabilities")
    assert reply.status_code == 200
    return reply.json()


def test_every_field_of_every_endpoint() -> None:
    """One entry per row, with its status; a row that the settings refuse has a reason."""
    with serve(FakeClient()) as served:
        endpoints = capabilities(served)["endpoints"]
    assert set(endpoints) == set(ROWS)
    for path in endpoints:
        assert set(endpoints[path]) == set(ROWS[path])
        for name, entry in endpoints[path].items():
            row = ROWS[path][name]
            assert (entry["allowed"], entry["meaning"]) == (row.allowed, row.meaning)
            assert entry["status"] == ("refused" if "reason" in entry else row.kind)


@pytest.mark.parametrize("setting", SETTINGS)
def test_capabilities_agree_with_replies(setting: str) -> None:
    """Law: a field that the settings refuse is a 400 that names it; the other fields are served."""
    with serve(FakeClient(), tokenizer=SETTINGS[setting]) as served:
        endpoints = capabilities(served)["endpoints"]
        for endpoint in BODIES:
            for name in [
                name for name, row in ROWS[PATHS[endpoint]].items() if row.unless is not None
            ]:
                entry = endpoints[PATHS[endpoint]][name]
                sent = good_body(name, endpoint)
                reply = httpx.post(f"{served.url}{PATHS[endpoint]}", json=sent)
                if entry["status"] == "refused":
                    assert reply.status_code == 400, name
                    # The error may name another refused field of the same body.
                    named = reply.json()["error"]["param"].partition(".")[0]
                    assert named in sent
                    assert endpoints[PATHS[endpoint]][named]["status"] == "refused"
                    assert named == name or named in BODIES[endpoint]
                    assert reply.json()["error"]["code"] == "unsupported_field"
                elif sent[name] != "anything":
                    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(
    ("setting", "path", "name", "reason"),
    [
        ("no chat template", "/v1/chat/completions", "messages", "no chat template"),
        ("no chat template", "/v1/responses", "input", "no chat template"),
        ("no chat template", "/v1/responses", "tools", "no chat template"),
        ("no fill-in-the-middle", "/v1/completions", "suffix", "no tokens for fill-in-the-middle"),
    ],
)
def test_settings_matter(setting: str, path: str, name: str, reason: str) -> None:
    """A field that one model supports is refused, with the reason, by another."""
    entries = []
    for tokenizer in (SETTINGS["all"], SETTINGS[setting]):
        with serve(FakeClient(), tokenizer=tokenizer) as served:
            entries.append(capabilities(served)["endpoints"][path][name])
    assert [entry["status"] for entry in entries] == ["supported", "refused"]
    assert "reason" not in entries[0]
    assert reason in entries[1]["reason"]


def test_limits_names_and_engine() -> None:
    """Limits that clients need; those of the engine are null until it is ready."""
    client = FakeClient()
    with serve(client, served_model_name=[MODEL, "other"], max_inflight=3) as served:
        found = capabilities(served)
        assert found["models"] == [MODEL, "other"]
        assert found["engine"]["proposer"] == "draft_model"
        assert found["limits"]["max_model_len"] == 512
        assert found["limits"]["k_max"] == 4
        assert found["limits"]["max_inflight"] == 3
        assert found["limits"]["max_grammar_bytes"] == 2**17
        assert found["limits"]["max_n"] == limits.MAX_N
        client.state, client.ready = "starting", None
        found = capabilities(served)
        assert found["limits"]["max_model_len"] is None
        assert found["engine"]["proposer"] is None
        assert found["limits"]["max_n"] == limits.MAX_N
