"""The command line: the meaning of options, and one sentence for each mistake."""

from __future__ import annotations

import os
import re
import socket
import sys
from pathlib import Path

import pytest
import uvloop

from engine.config import DraftModelConfig, NgramConfig
from engine.errors import ConfigError
from server import serve
from server.cli import build_parser, main, overrides
from server.config import Config, load_config
from server.lab.bench.front import main as bench_front
from server.listening import listen
from server.serve import start_banner


def parsed(*arguments: str) -> Config:
    return load_config(None, overrides(build_parser().parse_args(["serve", *arguments])))


def test_options_are_configuration_keys() -> None:
    """Law: every option of serve is a key, and a value keeps its type however it looks."""
    config = parsed(
        "--target", "org/big", "--draft", "true", "--host", "::1", "--port", "0",
        "--served-model-name", "4", "--api-key", "1234", "--set", "speculation.controller.k=3",
    )  # fmt: skip
    assert config.engine.target.path == "org/big"
    assert config.engine.speculation.proposer == DraftModelConfig(path="true")
    assert config.engine.speculation.k_max == 3
    assert (config.server.host, config.server.port) == ("::1", 0)
    assert (config.model_names[0], config.server.api_key) == ("4", "1234")


def test_a_model_may_have_several_names() -> None:
    """Law: the option may be repeated; the server announces the first name."""
    config = parsed("--served-model-name", "gpt-4o", "--served-model-name", "4")
    assert config.model_names == ("gpt-4o", "4")


def test_target_alone_means_ngram() -> None:
    """Law: --target without --draft needs no second model; --draft alone selects a draft model."""
    assert parsed("--target", "org/big").engine.speculation.proposer == NgramConfig()
    assert parsed("--draft", "d").engine.speculation.proposer == DraftModelConfig(path="d")
    assert parsed().engine.speculation.proposer == DraftModelConfig()


def test_set_wins_over_options() -> None:
    """Law: `make serve ARGS="--set server.port=9"` must work although make passes --port."""
    assert parsed("--port", "8000", "--set", "server.port=9").server.port == 9


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["serve", "/nowhere.toml"], ["/nowhere.toml", "No such file"]),
        (["serve", "--set", "server.port=99999"], ["server.port = 99999", "65535"]),
        (["serve", "--set", "speculation.k=1"], ["unknown key speculation.k"]),
        (["serve", "--target", "/nowhere"], ["the target model '/nowhere' was not found"]),
        (
            ["serve", "--target", "~no-such-user/x"],
            ["the target model '~no-such-user/x' was not found"],
        ),
        (["serve", "--target", "x" * 9000], ["the target model 'xxx", "was not found"]),
        (["serve", "--draft", "/nowhere"], ["the draft model '/nowhere' was not found"]),
        (["serve", "--draft", "/"], ["the draft model '/' has no config.json"]),
    ],
)
def test_mistakes_are_one_sentence(
    arguments: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: exit code 2, one line on stderr, no traceback. Bug: a missing folder was reported by the
    engine, below log lines and after a minute of compiling; a missing target was not called the
    target; and a name that is no valid file name ended in a traceback."""
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("foredraft: ")
    assert error.count("\n") == 1
    assert len(error) < 400
    for part in parts:
        assert part in error


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["serve", "--port", "x"], "--port: 'x' is not a whole number from 0 to 65535"),
        (["serve", "--port", "99999"], "--port: '99999' is not a whole number from 0 to 65535"),
        (["serve", "--unheard-of"], "--unheard-of"),
        ([], "COMMAND"),
        (["sing\nsong"], "invalid choice"),
    ],
)
def test_mistakes_in_arguments_are_one_sentence(
    arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: usage lines came before the sentence."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert error.startswith("foredraft")
    assert error.count("\n") == 1
    assert part in error


def test_port_in_use_is_a_sentence() -> None:
    """Law: a port in use is named before any model is loaded."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1 port {port}: .* in use"):
            listen("127.0.0.1", port)


@pytest.mark.parametrize(
    ("host", "dialled"), [("localhost", ("127.0.0.1", "::1")), ("::", ("127.0.0.1", "::1"))]
)
def test_a_host_of_two_families_listens_on_both(host: str, dialled: tuple[str, ...]) -> None:
    """Bug: `localhost` and `::` used one family only; half of all clients try the other first."""
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    listeners = listen(host, 0)
    port = listeners[0].getsockname()[1]
    known = {info[4][0] for info in socket.getaddrinfo(host, 0)}
    for address in dialled:
        if host == "::" or address in known:
            socket.create_connection((address, port)).close()
    for listener in listeners:
        listener.close()


def test_an_option_given_twice_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: the first of two API keys was dropped silently."""
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--api-key", "a", "--api-key", "b"])
    assert ended.value.code == 2
    assert "--api-key is given twice" in capsys.readouterr().err


def test_small_writes_are_not_held_back() -> None:
    """Bug: every reply was 40 ms late and tokens came in bursts: Nagle's algorithm was on, since
    asyncio turns it off only for sockets whose protocol number is set."""
    [listener] = listen("127.0.0.1", 0)
    with listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


def test_unknown_host_is_a_sentence() -> None:
    """Law: a host that does not resolve, or is not an address of this machine, is named."""
    with pytest.raises(ConfigError, match="cannot listen on 192.0.2.1 port 0"):
        listen("192.0.2.1", 0)


@pytest.mark.parametrize(
    ("arguments", "program"),
    [
        (["bench", "machine", "--quick"], ["engine.lab.bench", "machine", "--quick"]),
        (["tune", "--target", "t"], ["engine.lab.tune", "--target", "t"]),
        (["plan", "--list"], ["engine.lab.plan", "--list"]),
        (["replay", "trace"], ["engine.lab.replay", "trace"]),
        (["train", "demo", "--help"], ["engine.lab.demo.train", "--help"]),
        (["train", "draft", "--text", "f"], ["engine.lab.train.draft", "--text", "f"]),
        (["train", "medusa", "--heads", "2"], ["engine.lab.train.medusa", "--heads", "2"]),
        (["train", "eagle", "--depth", "2"], ["engine.lab.train.eagle", "--depth", "2"]),
    ],
)
def test_offline_commands_are_programs(
    arguments: list[str], program: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: an offline command runs its own program, which parses its options, --help included."""

    def replace_process(path: str, command: list[str]) -> None:
        assert (path, command) == (sys.executable, [sys.executable, "-m", *program])
        raise SystemExit(7)

    monkeypatch.setattr(os, "execv", replace_process)
    with pytest.raises(SystemExit, match="7"):
        main(arguments)


def test_start_banner_can_be_pasted() -> None:
    """Law: the address in the banner can be reached from this machine, and no key is shown."""
    config = load_config(None, ["server.host=0.0.0.0", "server.api_key=s3cret"])
    banner = start_banner(config, 8123)
    assert "curl -N http://127.0.0.1:8123/v1/completions" in banner
    assert '"model": "foredraft-demo"' in banner
    assert "in a browser: http://127.0.0.1:8123/\n" in banner
    assert "browser" not in start_banner(load_config(None, ["server.page=false"]), 1)
    assert "Authorization" in banner
    assert "s3cret" not in banner
    assert "http://[::1]:1/v1" in start_banner(load_config(None, ["server.host=::"]), 1)


@pytest.mark.parametrize(
    ("settings", "speculation"),
    [
        ([], "draft model demo, adaptive K from 0 to 8"),
        (["speculation.controller.k=4"], "draft model demo, K = 4"),
        (["target.path=/m", "speculation.proposer.kind=ngram"], "ngram, adaptive K from 0 to 8"),
        (["speculation.proposer.kind=none"], "none"),
        (["speculation.controller.k=0"], "none"),
    ],
)
def test_start_banner_names_the_proposer(settings: list[str], speculation: str) -> None:
    assert f"\n  speculation: {speculation}\n" in start_banner(load_config(None, settings), 1)


@pytest.mark.filterwarnings("error")
def test_an_interrupt_before_the_loop_begins_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: Ctrl-C in the first seconds of `serve` printed that a coroutine was never awaited."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(uvloop, "new_event_loop", interrupted)
    with pytest.raises(KeyboardInterrupt):
        serve.serve(load_config(None, ["server.port=0"]))


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Law: --help and --version exit with 0."""
    for arguments in (["--help"], ["--version"], ["serve", "--help"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0
    printed = capsys.readouterr().out
    for word in (
        "serve",
        "tune",
        "bench",
        "plan",
        "replay",
        "train",
        "foredraft 0",
        "--target",
        "n-gram",
    ):
        assert word in printed


@pytest.mark.parametrize("folder", ["engine", "server"])
def test_every_command_line_uses_the_shared_parser(folder: str) -> None:
    """Bug: some programs answered a mistake with usage lines before the sentence."""
    root = Path(__file__).parents[2]
    others = [
        str(path.relative_to(root))
        for path in sorted((root / folder).rglob("*.py"))
        if "argparse.ArgumentParser(" in path.read_text(encoding="utf-8")
    ]
    assert others == []  # the shared parser only inherits from it


@pytest.mark.parametrize("folder", ["engine", "server"])
def test_every_number_of_a_command_line_has_bounds(folder: str) -> None:
    """Bug: in some programs `--threads 0` was a traceback, `--rows x` gave argparse's own message,
    and `--minutes nan` started an endless run."""
    root = Path(__file__).parents[2]
    others = [
        str(path.relative_to(root))
        for path in sorted((root / folder).rglob("*.py"))
        if re.search(r"add(_argument)?\([^()]*\btype=(int|float)\b", path.read_text("utf-8"))
    ]
    assert others == []


@pytest.mark.parametrize("words", [["--streams", "0"], ["--scenes", "noon"], ["--rat", "5"]])
def test_a_mistake_is_one_sentence(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench_front(words)
    assert ended.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("foredraft bench front: ")
