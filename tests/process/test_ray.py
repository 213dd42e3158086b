"""Replicas behind Ray Serve, through both of its proxies."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.process.served import ROOT

pytest.importorskip("ray", reason="needs Ray Serve: pip install 'foredraft[ray]'")
# Ray's own modules cause deprecation warnings of Pydantic.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]
COMMAND = (sys.executable, "-m", "tests.process.replicas")


@pytest.mark.parametrize("proxy", ["python", "haproxy"])
def test_a_killed_replica_costs_no_reply(proxy: str) -> None:
    """Law: if a replica is killed, none of 32 clients sees an error or another reply, except for
    streams that cannot resume and say so; a client that leaves ends its request."""
    subprocess.run((*COMMAND, "1", "--no-scaling", "--proxy", proxy), cwd=ROOT, check=True)


def test_replicas_come_and_go_without_an_error() -> None:
    subprocess.run((*COMMAND, "0"), cwd=ROOT, check=True)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"gpu": 1}, "unknown key gpu"),
        ({"gpus": "many"}, "gpus = many is not allowed"),
        ({"min_replicas": 3, "max_replicas": "2"}, "`max_replicas` must be at least"),
        ({"set": "server.port=x"}, "server.port = x is not allowed"),
        ({"set": ["server.tls_certificate=a", "server.tls_key=b"]}, "Ray's proxy has the TLS"),
        ({"config": "nowhere.toml"}, "cannot read the configuration nowhere.toml"),
    ],
)
def test_bad_options_are_a_clear_error(options: dict[str, object], says: str) -> None:
    from engine.errors import ConfigError
    from server.replicas.ray_app import build

    with pytest.raises(ConfigError) as caught:
        build(options)
    assert says in str(caught.value)
