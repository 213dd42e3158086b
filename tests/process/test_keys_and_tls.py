"""The front end as a process: keys and certificates that change, and clients that do not read."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from server.keys import new_key
from tests.process.harness import starved
from tests.process.test_serve import COMMAND, PATIENCE, ROOT, Front, _spawn, body, front
from tests.support.scripted import Script


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def status(served: Front, key: str) -> int:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.get(f"{served.url}/v1/models", headers=headers).status_code


def test_keys_come_and_go_under_a_running_stream(tmp_path: Path) -> None:
    """Law: SIGHUP reloads the keys: new ones open, removed ones do not, running streams go on. An
    invalid file changes nothing, and the server goes on."""
    (old, old_lines), (new, new_lines) = new_key("old"), new_key("new")
    path = tmp_path / "keys.toml"
    path.write_text(old_lines)
    with front(Script(step_seconds=0.02), f"server.api_keys_file={path}") as served:
        headers = {"Authorization": f"Bearer {old}"}
        with httpx.stream(
            "POST", f"{served.url}/v1/completions", json=body(200), headers=headers, timeout=60
        ) as stream:
            lines = stream.iter_lines()
            next(lines)
            path.write_text(new_lines)
            assert (status(served, old), status(served, new)) == (200, 401)
            served.process.send_signal(signal.SIGHUP)
            until(lambda: status(served, new) == 200)
            assert status(served, old) == 401
            path.write_text("nonsense")
            served.process.send_signal(signal.SIGHUP)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert status(served, new) == 200
        served.process.send_signal(signal.SIGTERM)
        assert served.wait() == 0


def test_a_wrong_file_of_keys_is_one_sentence(tmp_path: Path) -> None:
    process = _spawn(Script(), "server.port=0", f"server.api_keys_file={tmp_path}/none.toml")
    _, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2
    assert stderr.splitlines()[-1].startswith("foredraft: cannot read the keys")


def certificate(folder: Path, name: str) -> None:
    subject = f"/CN={name}"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "2", "-subj", subject, "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", f"{folder}/key.pem", "-out", f"{folder}/cert.pem"],
        check=True, capture_output=True,
    )  # fmt: skip


def shown(port: int) -> str:
    return ssl.get_server_certificate(("127.0.0.1", port))


def test_tls_and_a_certificate_that_is_renewed(tmp_path: Path) -> None:
    """Law: streams and refusals of bad requests work over TLS; after SIGHUP new connections get the
    new certificate, and an invalid certificate changes nothing."""
    certificate(tmp_path, "first")
    files = [f"server.tls_{what}={tmp_path}/{file}.pem" for what, file in
             (("certificate", "cert"), ("key", "key"))]  # fmt: skip
    with front(Script(step_seconds=0.001), *files) as served:
        assert served.url.startswith("https://")
        port = int(served.url.rpartition(":")[2])
        trust = ssl.create_default_context(cafile=f"{tmp_path}/cert.pem")
        with httpx.Client(base_url=served.url, verify=trust) as http:
            reply = http.post("/v1/completions", json=body(20))
            assert reply.text.endswith("data: [DONE]\n\n")
        with trust.wrap_socket(
            socket.create_connection(("127.0.0.1", port)), server_hostname="127.0.0.1"
        ) as bad:
            bad.sendall(b"nonsense\r\n\r\n")
            refusal = b""
            while b"invalid_http" not in refusal:
                refusal += bad.recv(65536) or pytest.fail("closed without a reason")
        first = shown(port)
        certificate(tmp_path, "second")
        served.process.send_signal(signal.SIGHUP)
        until(lambda: shown(port) != first)
        second = shown(port)
        (tmp_path / "key.pem").write_text("nonsense")
        served.process.send_signal(signal.SIGHUP)
        served.process.send_signal(signal.SIGHUP)
        assert shown(port) == second
        served.process.send_signal(signal.SIGTERM)
        assert served.wait() == 0


@pytest.mark.parametrize("broken", ["keys.toml", "key.pem"])
def test_keys_and_certificate_are_read_again_each_on_its_own(tmp_path: Path, broken: str) -> None:
    """Bug: invalid keys kept a certificate from being renewed, and with an invalid certificate the
    log said that nothing changed, though the keys had."""
    (_, old_lines), (new, new_lines) = new_key("old"), new_key("new")
    certificate(tmp_path, "first")
    keys, log = tmp_path / "keys.toml", tmp_path / "log"
    keys.write_text(old_lines)
    settings = {"port": 0, "api_keys_file": keys, "tls_certificate": tmp_path / "cert.pem",
                "tls_key": tmp_path / "key.pem"}  # fmt: skip
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [*COMMAND, *(f"server.{name}={value}" for name, value in settings.items())],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True, env=Script().environment(),
        )  # fmt: skip
    with process:
        try:
            assert process.stdout is not None
            url = httpx.URL(process.stdout.readline().split(" at ")[1].strip())
            assert url.port is not None
            first = shown(url.port)
            certificate(tmp_path, "second")
            keys.write_text(new_lines)
            (tmp_path / broken).write_text("nonsense")
            process.send_signal(signal.SIGHUP)
            until(lambda: log.read_text().count("SIGHUP: ") == 2)
            headers = {"Authorization": f"Bearer {new}"}
            reply = httpx.get(url.join("/v1/models"), headers=headers, verify=False)
            is_key = broken == "key.pem"
            assert (reply.status_code == 200, shown(url.port) != first) == (is_key, not is_key)
        finally:
            process.kill()
    rests = [line.partition("SIGHUP: ")[2] for line in log.read_text().splitlines()]
    messages = [line for line in rests if line]
    if is_key:
        assert messages[0] == "1 keys"
        assert messages[1].startswith("the old certificate is kept: cannot use the certificate")
    else:
        assert messages[0].startswith("the old keys are kept: the keys ")
        assert messages[1] == "new connections get the certificate as it is now"


def test_a_certificate_that_cannot_be_used_is_one_sentence(tmp_path: Path) -> None:
    """Law: it comes before anything is loaded, and nothing asks for a password."""
    certificate(tmp_path, "any")
    for what in (("-----BEGIN nonsense"), None):
        key = tmp_path / "key.pem"
        key.unlink() if what is None else key.write_text(what)
        process = _spawn(
            Script(), "server.port=0", f"server.tls_certificate={tmp_path}/cert.pem",
            f"server.tls_key={key}",
        )  # fmt: skip
        _, stderr = process.communicate(timeout=PATIENCE)
        assert process.returncode == 2
        assert stderr.splitlines()[-1].startswith("foredraft: cannot use the certificate")


@pytest.mark.parametrize("ended", [False, True])
def test_a_client_that_does_not_read_does_not_delay_the_end(tmp_path: Path, ended: bool) -> None:
    """Bug: with such a client the server overran its grace by six seconds and logged a traceback
    for each one. Law: it costs no time beyond the grace, whether the engine has finished its
    request or not."""
    log, script = tmp_path / "log", Script(tokens_per_step=64, step_seconds=0.0 if ended else 0.1)
    settings = ("server.port=0", "server.grace_seconds=1")
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [*COMMAND, *settings], cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True,
            env=script.environment(),
        )  # fmt: skip
    with process, socket.socket() as stuck:
        try:
            assert process.stdout is not None
            url = httpx.URL(process.stdout.readline().split(" at ")[1].strip())
            many = {"return_token_ids": True, "n": 16 if ended else 128}
            content = json.dumps({**body(4000), **many}).encode()
            stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            stuck.connect((url.host, url.port))
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n"
            stuck.sendall(head.encode() + b"\r\n" + content)
            until(lambda: metric(url, "generation_tokens_total") >= 64_000)  # no buffer holds them
            until(lambda: metric(url, "requests_running") == 0 or not ended)
            process.send_signal(signal.SIGTERM)
            assert seconds_to_exit(process) < 5.0
            assert process.returncode == 0
        finally:
            process.kill()
    lines = log.read_text().splitlines()
    assert [line for line in lines if "Traceback" in line or " ERROR " in line] == []


def metric(url: httpx.URL, name: str) -> float:
    metrics = httpx.get(url.join("/metrics"), timeout=PATIENCE).text
    return float(metrics.partition(f"\nforedraft_{name}{{")[2].split()[1])


def seconds_to_exit(process: subprocess.Popen[str]) -> float:
    """Wait for the exit; return the seconds by a clock that stands still while the process or this
    test waits for a CPU."""

    def now() -> float:
        return time.monotonic() - starved(process.pid) - starved(os.getpid())

    began = seen = now()
    while process.poll() is None:
        seen = now()
        time.sleep(0.02)
    return seen - began
