"""`foredraft bench --url` against a whole server that is switched while it serves."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from server.lab.bench.__main__ import main
from tests.process.served import SCRIPTED, serving
from tests.support.scripted import Script

ADMIN = "server.admin_key=sk-admin"


def test_a_server_is_switched_and_left_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: every mode is measured, all texts are equal, and the mode is restored at the end."""
    found = tmp_path / "found.json"

    async def scenario() -> None:
        script = Script(vocab_size=128, tokens_per_step=4, step_seconds=0.002)
        async with serving((*SCRIPTED, ADMIN), script.environment()) as server:
            headers = {"Authorization": "Bearer sk-admin"}
            body = {"mode": "fixed", "k": 2}
            assert (await server.http.post("/speculation", json=body, headers=headers)).is_success
            words = ["--url", str(server.http.base_url), "--admin-key", "sk-admin", "--json",
                     str(found), "--kinds", "code", "--temperatures", "0", "--concurrency", "2",
                     "--rounds", "2", "--tokens", "24"]  # fmt: skip
            assert await asyncio.to_thread(main, words) == 0
            present = (await server.http.get("/speculation")).json()
            assert (present["mode"], present["k"]) == ("fixed", 2)

    asyncio.run(scenario())
    assert "code T=0 x2" in capsys.readouterr().out
    measured = json.loads(found.read_text())
    assert measured["modes"] == ["off", "K=1", "K=2", "K=3", "auto"]  # the server's largest K is 3
    assert measured["texts_equal"] == measured["texts_compared"] > 0
    assert measured["texts_must_be_equal"]
    (cell,) = measured["cells"]
    waits = {name: len(mode["first_token_seconds"]) for name, mode in cell["modes"].items()}
    assert waits == dict.fromkeys(measured["modes"], 2)
    rates = {name: mode["tokens_per_second"] for name, mode in cell["modes"].items()}
    assert rates["auto"] > rates["off"]  # four tokens a step instead of one
