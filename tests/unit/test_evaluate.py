"""`foredraft evaluate` without an engine: measurements and reports."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from engine.config import SpeculationConfig
from engine.errors import ConfigError, EngineError
from engine.lab.comparison.workload import OFF, Arm, Request
from engine.messages import SetSpeculation, Submit
from server.app import create_app
from server.config import Config
from server.lab.bench.client import Client
from server.lab.bench.player import Servers
from server.lab.evaluate.__main__ import (
    Connect,
    build_parser,
    configs_of,
    evaluate,
    main,
    measured,
)
from server.lab.evaluate.player import settings_of
from tests.support.app_client import AppClient
from tests.support.fake_client import FakeClient, hashed_script, make_ready
from tests.support.serving import services_of

ROOT = Path(__file__).parents[2]
CHAT = {"messages": [{"role": "user", "content": "a"}]}
Price = Callable[[int, int], float]


def memory_bound(load: int, k: int) -> float:
    """Return 10 ms, plus 1 ms per row beyond eight, plus 0.5 ms per draft step."""
    return 0.010 + 0.001 * max(0, load * (k + 1) - 8) + 0.0005 * k


def full(load: int, k: int) -> float:
    """Return a time that grows with the square of the rows."""
    return 0.001 * (load * (k + 1)) ** 2


def compute_bound(load: int, k: int) -> float:
    """Return a time in which each row costs as much as a step."""
    return 0.010 * load * (k + 1) + 0.0005 * k


class PricedClient(FakeClient):
    """Accepts every draft token. `price(load, k)`: seconds of a step in which each of `load`
    requests has `k` draft tokens. At `wrong` K the fourth token differs."""

    def __init__(self, price: Price, *, wrong: int | None = None) -> None:
        hashed = hashed_script()

        def script(submit: Submit, position: int) -> int:
            is_wrong = self.k == wrong and self.speculation.mode == "fixed" and position == 3
            return ord("!") if is_wrong else hashed(submit, position)

        proposers = ("prediction", "grammar", "ngram", "draft_model", "lookahead")
        ready = make_ready(k_max=8, proposers=proposers, default_proposers=proposers)
        super().__init__(script=script, ready=ready, state="starting")
        self.price, self.now, self.k = price, 0.0, 0

    def set_speculation(self, command: SetSpeculation) -> None:
        super().set_speculation(command)
        self.k = {"off": 0, "auto": 2, "fixed": command.k}[command.mode]
        self._tokens_per_step = self.k + 1

    async def _turn(self) -> None:
        self.now += self.price(self.inflight, self.k) / self.inflight
        await super()._turn()


def server_over(client: PricedClient) -> Connect:
    """Return a replacement for starting a server: its application over that engine."""

    @contextmanager
    def connect(config: Config) -> Iterator[tuple[int, Client]]:
        client.state = "ready"
        app = create_app(services_of(client, config))
        yield 0, AppClient(app, lambda: client.now, api_key=config.server.admin_key)

    return connect


def prompts(tmp_path: Path, *more: dict[str, Any]) -> Path:
    path = tmp_path / "p.jsonl"
    lines: list[dict[str, Any]] = [
        {"prompt": "The sea was calm."},
        {"messages": [{"role": "user", "content": "hello"}]},
        {"prompt": "The wind was not.", "temperature": 0.5, "seed": 7},
        *more,
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def run(client: PricedClient, path: Path, *options: str) -> int:
    return evaluate(
        build_parser().parse_args(
            ["--prompts", str(path), "--max-tokens", "32", "--concurrency", "1", *options]
        ),
        connect=server_over(client),
    )


def test_the_best_k_is_found_by_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Law: where rows are free the largest K wins, where each costs more than the last K = 0 wins;
    every cell has every mode; the ratios follow from the prices."""
    out = tmp_path / "r.json"
    options = ["--json", str(out), "--concurrency", "1,2", "--temperature", "0"]
    client = PricedClient(lambda load, k: memory_bound(1, k) if load == 1 else full(load, k))
    assert run(client, prompts(tmp_path), *options) == 0
    printed = capsys.readouterr().out
    assert "texts equal across modes: " in printed
    found = json.loads(out.read_text())["found"][0]
    cells = {(c["kind"], c["concurrency"]): c["modes"] for c in found["cells"]}
    assert cells.keys() == {(t, load) for t in ("T=0", "T=0.5") for load in (1, 2)}
    one, many = (
        {name: mode["against_off"]["value"] for name, mode in cells["T=0", load].items()}
        for load in (1, 2)
    )
    assert one["draft K=4"] == pytest.approx(5 / 1.2, rel=0.1)
    assert one["draft K=8"] > one["draft K=4"]
    assert many["draft K=8"] < many["draft K=1"] < 1.0
    assert found["texts_compared"] == found["texts_equal"] > 0
    for name in ("off", "draft K=4", "draft auto", "ngram + draft auto", "ngram K=8"):
        assert f" {name} " in printed
    assert "`foredraft tune` says in one sentence" in printed.splitlines()[-1]


def test_request_fields_mean_what_they_do_for_the_server(tmp_path: Path) -> None:
    """Law: the fields of a body keep their meaning: temperature, seed, choices, lengths. The mode
    sets the K; a prompt without a temperature runs at each one of the grid."""
    client = PricedClient(memory_bound)
    lines = [
        {"prompt": "a", "temperature": 0, "n": 2, "max_tokens": 5, "top_k": 3, "min_tokens": 4},
        {"prompt": "b", "seed": 4, "stream": True, "stream_options": {"include_usage": True}},
        {**CHAT, "max_completion_tokens": 7},
    ]
    path = tmp_path / "p.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert run(client, path, "--concurrency", "1", "--seed", "3") == 0
    by_prompt = {last: [s.params for s in client.submitted if s.prompt[-1:] == [last]]
                 for last in b"ab"}  # fmt: skip
    assert {p.top_k for p in by_prompt[ord("a")]} == {3}
    assert {p.temperature for p in by_prompt[ord("a")]} == {0}
    assert {p.max_tokens for p in by_prompt[ord("a")]} == {1, 5}
    assert {p.temperature for p in by_prompt[ord("b")]} == {0, 1}
    assert {p.seed for p in by_prompt[ord("b")]} == {4}
    chats = [s.params for s in client.submitted if s.prompt[-1] not in b"ab"]
    assert {p.max_tokens for p in chats} == {1, 7}
    wishes = {s.params.speculation and s.params.speculation.proposers for s in client.submitted}
    assert ("grammar", "prediction", "draft_model") in wishes


def test_a_changed_text_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Law: the exit code is 1."""
    assert run(PricedClient(memory_bound, wrong=4), prompts(tmp_path)) == 1
    [equal, compared] = re.findall(
        r"texts equal across modes: (\d+) of (\d+)", capsys.readouterr().out
    )[0]
    assert int(equal) < int(compared)


def test_a_run_takes_about_the_time_given(tmp_path: Path) -> None:
    """Law: the run takes about the minutes given, even for a slow model, with shorter replies."""
    slow = PricedClient(lambda load, k: 20 * memory_bound(load, k))
    out = tmp_path / "r.json"
    options = ["--json", str(out), "--minutes", "20", "--max-tokens", "512"]
    assert run(slow, prompts(tmp_path), *options) == 0
    assert 400 < slow.now < 2400
    cells = json.loads(out.read_text())["found"][0]["cells"]
    assert all(cell["tokens"] < 256 for cell in cells)


@pytest.mark.parametrize(
    ("line", "part", "needs_engine"),
    [
        ({"prompt": "a", "temprature": 1}, "unknown field `temprature`", False),
        ({"prompt": "a", "temperature": 3}, "`temperature`", False),
        ({"prompt": "a", "speculation": {"enabled": False}}, "`speculation`", False),
        ({"prompt": ""}, "`prompt`", False),
        ({"prompt": "\ud800"}, "not valid JSON", False),
        ({"messages": []}, "`messages`", False),
        ({"prompt": "a" * 600}, "maximum context length is 512", True),
        ({"prompt": "a", "max_tokens": 0}, "`max_tokens` is 0", True),
        ({**CHAT, "chat_template_kwargs": {"x": 1}}, "`chat_template_kwargs`", True),
        ({"prompt": "a", "structured_outputs": {"regex": "("}}, "cannot be enforced", True),
    ],
)
def test_bad_bodies_are_one_sentence_and_nothing_is_written(
    tmp_path: Path, line: dict[str, Any], part: str, needs_engine: bool
) -> None:
    """Law: the error has the line and the server's own sentence, and no file is written. If the
    body alone shows the error, it comes before the models are loaded."""
    client = PricedClient(memory_bound)
    path = prompts(tmp_path, line)
    with pytest.raises(ConfigError) as caught:
        run(client, path, "--json", str(tmp_path / "b"))
    assert f"{path}, line 4: " in str(caught.value)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)
    assert (client.state == "ready") == needs_engine
    assert [path.name for path in tmp_path.iterdir()] == ["p.jsonl"]


def test_a_refusal_of_the_engine_names_the_line(tmp_path: Path) -> None:
    """Law: the error has the line and the engine's sentence, and comes before any measurement."""
    client = PricedClient(memory_bound)
    client._refusal, client._bad_request = "the engine does not want it", True
    with pytest.raises(ConfigError, match="line 1: the engine does not want it"):
        run(client, prompts(tmp_path))


def test_a_bad_body_is_found_if_it_is_not_chosen_to_run(tmp_path: Path) -> None:
    """Bug: of a long file only the prompts chosen to run were checked."""
    path = prompts(tmp_path, {"prompt": "a", "temperature": 3}, {"prompt": "b"})
    with pytest.raises(ConfigError, match="line 4"):
        run(PricedClient(memory_bound), path, "--max-prompts", "1")


def test_a_reply_may_be_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Law: a model that ends its reply at once is measured like any other."""
    client = PricedClient(memory_bound)
    client._script = lambda submit, position: 257
    assert run(client, prompts(tmp_path), "--temperature", "0") == 0
    assert "texts equal across modes: " in capsys.readouterr().out


def test_several_drafts_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Law: each draft runs on its own engine; n-gram look-up runs once."""
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
    given = [word for folder in folders for word in ("--draft", str(folder))]
    run(PricedClient(memory_bound), prompts(tmp_path), "--temperature", "0", *given)
    printed = capsys.readouterr().out
    for folder in folders:
        assert f" {folder} K=4 " in printed
    assert printed.count("T=0 x1 ") == 9 + 7


def test_without_a_proposer_ngram_is_tried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: for a configuration without a proposer, those that need no model are evaluated."""
    client = PricedClient(memory_bound)
    run(client, prompts(tmp_path), "--set", "speculation.proposer.kind=none")
    printed = capsys.readouterr().out
    assert " ngram auto " in printed
    assert " draft " not in printed


def test_more_requests_at_a_time_than_the_engine_takes(tmp_path: Path) -> None:
    """Law: the error names the limit."""
    with pytest.raises(EngineError, match=r"schedule.max_sequences = 2"):
        run(
            PricedClient(memory_bound),
            prompts(tmp_path),
            "--concurrency",
            "4",
            "--set",
            "schedule.max_sequences=2",
        )


def test_several_configurations_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: each runs on its own engine under the name that was given; n-gram look-up runs once. A
    last table ranks the best arms of all main proposers, and of n-grams alone, by their ratios to
    `off`. Bug: nothing said which one is the best, and the test had one proposer twice."""
    files = [tmp_path / f"{name}.toml" for name in ("one", "two")]
    files[0].write_text("[speculation.proposer]\npath = 'demo'\n")
    files[1].write_text("[speculation.proposer]\nkind = 'lookahead'\n")

    def price(load: int, k: int) -> float:
        wish = client.submitted[-1].params.speculation
        asked = wish.proposers if wish and wish.proposers else ()
        return (2 if "lookahead" in asked else 1) * (memory_bound if load == 1 else full)(load, k)

    client = PricedClient(price)
    options = ["--temperature", "0", "--concurrency", "1,2", "--", *map(str, files)]
    run(client, prompts(tmp_path), *options)
    tables, _, joint = capsys.readouterr().out.partition("best arm of each proposer")
    for file in files:
        assert f" {file} K=4 " in tables
        assert f" ngram + {file} auto " in tables
    assert tables.count("T=0 x1 ") == 9 + 7
    wishes = (sent.params.speculation for sent in client.submitted)
    asked = {wish.proposers[-1] for wish in wishes if wish and wish.proposers}
    assert asked == {"ngram", "draft_model", "lookahead"}
    assert "each against its own off" in joint
    one, two, many = (joint.index(text) for text in ("T=0 x1:", "T=0 x2:", "T=0.5 x2:"))
    alone, loaded = joint[one:two].splitlines()[:3], joint[many:].splitlines()[:3]
    assert re.match(rf"T=0 x1: +({files[0]}|ngram) K=8 +\d\.\d\dx \[.*\] +best$", alone[0])
    assert alone[1].endswith("may be as good")
    assert re.match(rf" +(ngram \+ )?{files[1]} (K=8|auto) +\d\.\d\dx \[.*\]$", alone[2])
    assert loaded[0].endswith("off is faster")


def test_a_configuration_for_production_is_measured_in_private(tmp_path: Path) -> None:
    """Law: no TLS, key, limit or collector of the operator's stands between the server and this
    program. Bug: a configuration with TLS ended with `broke off`."""
    keys = ("tls_certificate=c", "tls_key=k", "api_keys_file=f", "request_timeout_seconds=1",
            "max_inflight=1", "max_waiting_tokens=1", "otlp_endpoint=http://x:4318")  # fmt: skip
    words = [word for key in keys for word in ("--set", f"server.{key}")]
    parsed = build_parser().parse_args(["--prompts", str(prompts(tmp_path)), *words])
    [config] = configs_of(parsed).values()
    server = measured(config).server
    assert all(getattr(server, key.partition("=")[0]) is None for key in keys)


def proposers_of(
    speculation: SpeculationConfig, *, free: bool = True, predicted: bool = False
) -> dict[str, tuple[str, ...]]:
    settings = settings_of(speculation, "m", free=free, predicted=predicted)
    return {arm.name: proposers for arm, proposers in settings.items()}


def test_every_auto_adapts_again_before_its_turn() -> None:
    """Law: like `auto` of bench, its turn begins with a repetition of the previous round. Bug: here
    its arms are named after proposers, and none was repeated."""
    own, first, second = Mock(), [[Request("1", 0.0, 1, 4)]], [[Request("2", 0.0, 2, 4)]]
    servers = Servers(own, {})
    for lanes in (first, second):
        servers.round([OFF, Arm("auto", 0, "draft auto"), Arm("fixed", 2, "draft K=2")], lanes)
    asked = [call.args[0] for call in own.ask.call_args_list]
    assert asked == [first, first, first, second, first, second, second]


def test_modes_have_their_proposers() -> None:
    """Law: the draft alone, behind n-gram look-up, and look-up alone; proposers that serve the
    request's own fields come first in all of them."""
    made = proposers_of(SpeculationConfig())
    assert made["off"] == ()
    assert made["m K=2"] == made["m auto"] == ("grammar", "prediction", "draft_model")
    assert made["ngram + m auto"] == ("grammar", "prediction", "ngram", "draft_model")
    assert made["ngram auto"] == ("grammar", "prediction", "ngram")
    assert not [name for name in made if "suffix" in name or "prediction" in name]


@pytest.mark.parametrize(
    "speculation",
    [
        SpeculationConfig(remembered_tokens=100),
        SpeculationConfig(companions=("grammar", "prediction", "suffix")),
    ],
)
def test_configured_suffixes_are_tried(speculation: SpeculationConfig) -> None:
    """Law: alone and before the main proposer, like n-gram look-up, and nowhere else."""
    made = proposers_of(speculation)
    assert made["m auto"] == ("grammar", "prediction", "draft_model")
    assert made["suffix + m auto"] == ("grammar", "prediction", "suffix", "draft_model")
    assert made["suffix K=8"] == made["suffix auto"] == ("grammar", "prediction", "suffix")
    assert made["ngram auto"] == ("grammar", "prediction", "ngram")
    assert made.keys() - proposers_of(speculation, free=False).keys() == {
        f"{name} {k}" for name in ("ngram", "suffix") for k in ("K=8", "auto")
    }


@pytest.mark.parametrize("companions", [("prediction", "grammar"), ("grammar",), ()])
def test_predictions_are_tried_without_a_draft(companions: tuple[Any, ...]) -> None:
    """Law: where prompts have predictions, an arm proposes from them, and no name is there twice
    (the server would refuse it)."""
    made = proposers_of(SpeculationConfig(companions=companions), predicted=True)
    assert set(made["prediction auto"]) == {"prediction", *companions}
    assert len(made["prediction auto"]) == len({"prediction", *companions})


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda p: p.stem)
def test_arms_are_called_by_the_configured_proposer(path: Path) -> None:
    """Bug: figures of Medusa's heads were printed as those of `ngram`."""
    parsed = build_parser().parse_args(["--prompts", "p", str(path)])
    [(name, config)] = configs_of(parsed).items()
    kind = config.engine.speculation.proposer.kind
    assert name == {"draft_model": "draft", "none": "ngram"}.get(kind, kind)
    made = settings_of(config.engine.speculation, name, free=True, predicted=False)
    [main] = {asked[-1] for arm, asked in made.items() if arm.name.startswith(f"{name} ")}
    assert main == ("ngram" if kind == "none" else kind)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--prompts", "nowhere.jsonl"], "cannot read the prompts in nowhere.jsonl"),
        (["--prompts", "p", "--json", "no/where.json"], "cannot write no/where.json"),
        (["--prompts", "p", "--json", "p"], "--json names p, which is read"),
        (["none.toml", "--prompts", "p"], "none.toml"),
        (["--prompts", "p", "--set", "speculation.k=1"], "unknown key speculation.k"),
    ],
)
def test_mistakes_are_one_sentence(
    arguments: list[str],
    part: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Law: exit code 2 and a line on stderr, before any model is loaded."""
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("foredraft evaluate: ")
    assert error.count("\n") == 1
    assert part in error


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--prompts", "p", "--minutes", "0"],
        ["--prompts", "p", "--minutes", "nan"],
        ["--prompts", "p", "--concurrency", "1,x"],
        ["--prompts", "p", "--temperature", "3"],
        ["--prompts", "p", "--max-prompts", "-1"],
    ],
)
def test_wrong_options_say_what_is_allowed(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: exit code 2 and one sentence. Bug: usage lines came first."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("foredraft evaluate: ")
    assert error.count("\n") == 1


def test_options_are_keys_of_the_configuration() -> None:
    """Law: the engine is started with the options; --set takes precedence."""
    options = ["--prompts", "p", "--target", "4"]
    parsed = build_parser().parse_args([*options, "--set", "attention=sdpa"])
    [config] = configs_of(parsed).values()
    assert (config.engine.target.path, config.engine.attention) == ("4", "sdpa")
    parsed = build_parser().parse_args([*options, "--set", "target.path=x"])
    [config] = configs_of(parsed).values()
    assert config.engine.target.path == "x"
