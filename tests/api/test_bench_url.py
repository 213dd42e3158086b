"""`foredraft bench --url` against foreign servers, servers that refuse, and no server at all."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from engine.messages import StepMetrics
from server.lab.bench.__main__ import main
from server.lab.bench.client import Client, Counters
from server.lab.bench.player import Server, grown
from tests.support.serving import serve

SMALL = ["--kinds", "random", "--temperatures", "0", "--concurrency", "2", "--rounds", "2",
         "--tokens", "5"]  # fmt: skip


class Other(BaseHTTPRequestHandler):
    """An OpenAI-compatible server that is not ours: no /speculation, text in chunks of unknown
    size. The path selects its kind: /slow adds delays, /strict refuses top_k too."""

    bodies: list[dict[str, Any]] = []
    keys: list[str] = []
    breaks_off = False
    usage = True

    def do_GET(self) -> None:
        known = self.path.endswith("/v1/models")
        self._answer(200 if known else 404, {"data": [{"id": "m"}]} if known else {"detail": "no"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body["path"] = self.path
        self.keys.append(self.headers.get("Authorization", ""))
        refused = {"ignore_eos", "return_token_ids"} | (
            {"top_k"} if self.path.startswith("/strict") else set()
        )
        if wrong := sorted(refused & body.keys()):
            self._answer(400, {"error": {"message": f"unknown field {wrong[0]}"}})
            return
        self.bodies.append(body)
        self.send_response(200)
        self.end_headers()
        for text in ("ab", "", "cde"):
            time.sleep(0.02 if self.path.startswith("/slow") else 0.002)
            self._event({"choices": [{"text": text}]})
        if self.usage:
            self._event({"choices": [], "usage": {"completion_tokens": body["max_tokens"]}})
        if not self.breaks_off:
            self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, chunk: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


@pytest.fixture
def other() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Other)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()
    Other.bodies.clear()
    Other.keys.clear()
    Other.breaks_off, Other.usage = False, True


def sentence(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line that a mistake prints; the exit code is 2 and stdout is empty."""
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = [line for line in captured.err.splitlines() if line.startswith("foredraft bench: ")]
    assert len(lines) == 1
    assert "Traceback" not in captured.err
    return lines[0]


def test_any_server_is_measured_as_it_is(
    other: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: one arm, tokens by the server's own count, and without the fields that it refuses."""
    found = tmp_path / "found.json"
    assert main(["--url", other + "/v1", *SMALL, "--json", str(found)]) == 0
    output = capsys.readouterr().out
    assert "random T=0 x2" in output
    assert "this server cannot switch K" in output
    assert "left out ignore_eos, return_token_ids" in output
    (cell,) = json.loads(found.read_text())["cells"]
    assert list(cell["modes"]) == ["served"]
    runs = cell["modes"]["served"]["rounds"]
    assert all(5 < run["tokens"] <= (3 + 5 + 5) + 3 * 5 for run in runs)  # two lanes, of two ages
    assert all("ignore_eos" not in body and "return_token_ids" not in body for body in Other.bodies)
    assert Other.bodies[-1].items() >= {"top_k": 0, "min_p": 0, "top_p": 1.0}.items()
    salted = [body for body in Other.bodies if body.get("cache_salt")]
    assert {body["max_tokens"] for body in salted} == {1}  # salted requests measure TTFT only


def test_several_servers_are_measured_in_turn(
    other: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: each other server is an arm beside the modes, with the same prompts, seeds and lengths;
    every arm is compared with the fastest other server, texts only among our own modes."""
    monkeypatch.setenv("STRICT_API_KEY", "sk-theirs")
    found = tmp_path / "found.json"
    with serve(admin_key="sk-2") as served:
        words = ["--url", served.url, *SMALL, "--admin-key", "sk-2", "--modes", "off,1,auto",
                 "--against", f"slow={other}/slow", "--against", f"strict={other}/strict/v1",
                 "--json", str(found)]  # fmt: skip
        assert main(words) == 0
    output = capsys.readouterr().out
    assert "against the fastest other" in output
    assert "strict/v1 (m, without ignore_eos, return_token_ids, top_k)" in output
    written = json.loads(found.read_text())
    assert written["modes"] == ["off", "K=1", "auto", "slow", "strict"]
    assert written["texts_compared"] == written["texts_equal"] > 0
    (cell,) = written["cells"]
    assert cell["best_other"] == "strict"
    ratios = {
        name: mode["against_the_fastest_other"]["value"] for name, mode in cell["modes"].items()
    }
    assert ratios["strict"] == 1.0
    assert ratios["slow"] < 1.0
    assert all(len(mode["rounds"]) == 2 for mode in cell["modes"].values())
    strict = [body for body in Other.bodies if body["path"].startswith("/strict")]
    assert all("ignore_eos" not in body and "top_k" not in body for body in strict)
    prompts = {
        name: {(b["prompt"], b["seed"]) for b in Other.bodies
               if b["path"].startswith(name) and b["max_tokens"] == 5}
        for name in ("/slow", "/strict")
    }  # fmt: skip
    assert prompts["/slow"] == prompts["/strict"]
    assert set(Other.keys) == {"", "Bearer sk-theirs"}


def test_two_foreign_servers_are_compared(other: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Law: two foreign servers, or one under two settings, are compared without Foredraft."""
    words = ["--url", other, *SMALL, "--against", f"again={other}"]
    assert main(words) == 0
    output = capsys.readouterr().out
    assert "  served  " in output
    assert "  again  " in output
    assert "texts equal" not in output


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--against", "llama"], "--against must be NAME=URL"),
        (["--against", "=http://x"], "--against must be NAME=URL"),
        (["--against", "auto=http://x"], "but is 'auto=http://x'"),
        (["--against", "a b=http://x"], "but is 'a b=http://x'"),
        (["--against", "a=http://x", "--against", "a=http://y"], "names 'a' twice"),
        (["--against", "a=ftp://x"], "--against must be like http://"),
        (["--against", "a=http://a..b"], "--against must be like http://"),
        (["--against", "a=http://127.0.0.1:9"], "no server answers at http://127.0.0.1:9"),
    ],
)
def test_mistakes_about_other_servers_are_one_line_errors(
    words: list[str], problem: str, other: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: the message quotes the option and names the server, and nothing is measured."""
    assert problem in sentence(["--url", other, *SMALL, *words], capsys)


def test_tokens_are_never_counted_by_events(other: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: a server that reported neither ids nor usage was counted by its chunks."""
    Other.usage = False
    assert "sends no usage" in sentence(["--url", other, *SMALL], capsys)


def test_no_server_is_a_one_line_error(capsys: pytest.CaptureFixture[str]) -> None:
    """Law: an unreachable server and a malformed URL each get a one-line message."""
    assert "no server answers at http://127.0.0.1:9" in sentence(
        ["--url", "http://127.0.0.1:9"], capsys
    )
    for url in ("127.0.0.1:8000", "ftp://x", "http://", "http://h:port", "http://[::1"):
        assert "--url must be like http://" in sentence(["--url", url], capsys)


def test_the_host_of_an_ipv6_address_is_in_brackets() -> None:
    """Bug: `Host: ::1:8000` names no host; servers that check it answered 400."""
    with suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        port, received = server.getsockname()[1], list[bytes]()

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                received.append(connection.recv(1 << 16))
                connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n{}")

        thread = threading.Thread(target=answer)
        thread.start()
        assert Client(f"http://[::1]:{port}").call("/version") == {}
        thread.join()
        assert f"\r\nHost: [::1]:{port}\r\n".encode() in received[0]


def test_modes_of_another_server_cannot_be_switched(
    other: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: requested modes are refused, not silently skipped."""
    line = sentence(["--url", other, *SMALL, "--modes", "off,auto"], capsys)
    assert "cannot be switched" in line


def test_a_stream_that_breaks_off_is_a_one_line_error(
    other: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: half a stream yields no figures and no file."""
    Other.breaks_off = True
    found = tmp_path / "found.json"
    line = sentence(["--url", other, *SMALL, "--json", str(found)], capsys)
    assert "broke off a stream" in line
    assert not list(tmp_path.iterdir())


def test_a_server_that_refuses_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    """Law: the message quotes the server's refusal and names the option that would help."""
    with serve() as served:
        line = sentence(["--url", served.url, *SMALL], capsys)
        assert "/speculation with 403" in line
        assert "--admin-key" in line
    with serve(api_key="sk-1") as served:
        assert "401" in sentence(["--url", served.url, *SMALL], capsys)
    with serve(admin_key="sk-2") as served:
        words = ["--url", served.url, *SMALL, "--admin-key", "sk-2", "--modes", "off,16"]
        line = sentence(words, capsys)
        assert "K = 16, but this server allows K up to 4" in line


def test_draft_tokens_are_counted_by_the_growth_of_counters() -> None:
    """Law: counter growth is split by position and by K; a server without counters has none."""
    name = "spec_decode_num_{}_tokens_per_pos_total"
    before: Counters = {(name.format("draft"), 0): 5.0}
    after: Counters = {
        (name.format("draft"), 0): 9.0,
        (name.format("draft"), 1): 4.0,
        (name.format("accepted"), 0): 3.0,
        (name.format("accepted"), 1): 1.0,
        ("spec_decode_chosen_k_total", 2): 4.0,
        (name.format("draft").replace("pos", "context"), "4k"): 8.0,
        (name.format("accepted").replace("pos", "context"), "4k"): 2.0,
        ("spec_decode_seconds_total", "verify"): 3.0,
        ("spec_decode_seconds_total", "host"): 1.0,
    }
    found = grown(before, after)
    assert found.acceptance == [0.75, 0.25]
    assert found.k_counts == [0.0, 0.0, 4.0]
    assert found.kept_by_context == {"4k": 0.25}
    assert (found.seconds, found.forward_seconds) == (4.0, 3.0)
    assert grown({}, {}).k_counts == []
    with serve() as served:
        step = StepMetrics(k_counts=[0, 0, 0, 2], proposed_behind=[0, 6], accepted_behind=[0, 3])
        served.metrics.observe_step(step)
        counters = Client(served.url).counters()
        assert counters["spec_decode_chosen_k_total", 3] == 2.0
        assert grown({}, counters).kept_by_context == {"4k": 0.5}
        assert Server(Client(served.url)).speculation is not None
