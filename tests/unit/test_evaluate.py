"""`foredraft evaluate` without an engine: what is measured, what is advised, what is written."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from engine.config import AdaptiveConfig, EngineConfig, FixedConfig, NgramConfig, NoProposerConfig
from engine.errors import ConfigError, EngineError
from engine.lab.evaluate_messages import Mode
from server.config import Config, ServerConfig, load_config
from server.lab.evaluate.__main__ import build_parser, main, overrides
from server.lab.evaluate.config_file import config_text, write_config
from server.lab.evaluate.contenders import PLAIN, contenders, recommended
from server.lab.evaluate.findings import Record
from server.lab.evaluate.prompts import PromptsError
from server.lab.evaluate.run import Options, run
from tests.support.byte_tokenizer import ByteTokenizer
from tests.support.fake_client import make_ready
from tests.support.fake_lab import FakeLab, compute_bound, memory_bound

CHAT = {"messages": [{"role": "user", "content": "a"}]}
EVIL = "</table><img src='x' onerror='alert(1)'> & \"more\""


def prompts(tmp_path: Path, *more: dict[str, Any]) -> Path:
    path = tmp_path / "p.jsonl"
    lines: list[dict[str, Any]] = [
        {"prompt": "The sea was calm."},
        {"prompt": "def area(r):\n    return r * r\n"},
        {"messages": [{"role": "user", "content": EVIL}]},
        {"prompt": "The wind was not.", "temperature": 0.5, "seed": 7},
        *more,
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def evaluate(
    lab: FakeLab,
    path: Path,
    served: Config | None = None,
    say: Callable[[str], object] = lambda line: None,
    **changes: Any,
) -> tuple[bool, str]:
    """Whether all texts were equal, and the card."""
    said: list[str] = []
    given: dict[str, Any] = {
        "prompts": path, "minutes": 10.0, "max_prompts": 64, "max_tokens": 32,
        "concurrency": (1, 4, 16), "temperature": (0.0, 1.0), **changes,
    }  # fmt: skip
    same = run(
        served or load_config(None),
        Options(**given),
        open_lab=lab,
        load=lambda config: ByteTokenizer(),
        clock=lab.clock,
        out=said.append,
        say=say,
    )
    return same, "".join(said)


def test_what_pays_is_found_by_load(tmp_path: Path) -> None:
    """Law: where rows are free the largest K wins, where they cost a step K = 0 does; each prompt
    is in each cell, and the reasons add up to what is measured."""
    lab, out = FakeLab(memory_bound), tmp_path / "r.json"
    same, card = evaluate(lab, prompts(tmp_path), json=out)
    assert same
    assert "Lossless" in card
    found = json.loads(out.read_text())
    cells = {(c["group"], c["concurrency"]): c for c in found["cells"]}
    assert cells.keys() == {(g, load) for g in ("T=0", "T>0") for load in (1, 4, 16)}
    assert cells["T=0", 1]["best"] in ("draft K=8", "ngram K=8")
    assert cells["T=0", 16]["best"] == PLAIN
    one = cells["T=0", 1]["contenders"]["draft K=4"]
    step = one["step"]
    assert one["speedup"] == pytest.approx(step["expected"], rel=0.1)
    assert step["verify"] + step["guess"] + step["host"] == pytest.approx(0.012 / 0.010)
    assert step["guesses"] == 4
    assert one["acceptance"] == pytest.approx([0.8, 0.64, 0.51, 0.41])
    assert found["repeats"] == [1.0] * len(found["repeats"])
    assert {(k["kind"], k["group"]) for k in found["kinds"]} == {
        ("prose", "T=0"), ("code", "T=0"), ("chat", "T=0"),
        ("prose", "T>0"), ("code", "T>0"), ("chat", "T>0"),
    }  # fmt: skip
    assert [p["reply"] for p in found["prompts"]] == [32] * 7


def test_where_nothing_pays_the_advice_is_no_guesses(tmp_path: Path) -> None:
    """Law: K = 0 is an answer, and its configuration has no proposer."""
    _, card = evaluate(FakeLab(compute_bound), prompts(tmp_path), served=None)
    assert "No guesses pay: K=0" in card
    assert "serve without guesses" in card
    assert 'kind = "none"' in card


def test_sequences_are_those_of_the_server(tmp_path: Path) -> None:
    """Law: fields of a body mean what they mean there: own temperature and seed, choices, stop
    strings (the text ends where plain decoding completes one), lengths."""
    lab = FakeLab(memory_bound)
    path = tmp_path / "p.jsonl"
    text = "".join(map(chr, lab._text(lab_submit(lab, tmp_path), Mode("off"))))
    lines = [
        {"prompt": "a", "temperature": 0, "n": 2, "max_tokens": 5, "top_k": 3, "min_tokens": 2},
        {"prompt": "b", "temperature": 0, "stop": text[4:6], "max_completion_tokens": None},
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    out = tmp_path / "r.json"
    evaluate(lab, path, json=out, concurrency=(1,))
    submits = [submit for batch in lab.batches for submit in batch.submits]
    assert {s.params.top_k for s in submits if s.prompt[-1] == ord("a")} == {3}
    assert len({s.params.seed for s in submits if s.prompt[-1] == ord("a")}) == 2
    assert [p["reply"] for p in json.loads(out.read_text())["prompts"]] == [5, 5, 6]


def lab_submit(lab: FakeLab, tmp_path: Path) -> Any:
    """What the lab is asked for a prompt "b"."""
    (tmp_path / "b.txt").write_text("b")
    probe = FakeLab(memory_bound)
    evaluate(probe, tmp_path / "b.txt", concurrency=(1,), temperature=(0.0,), text_as="completion")
    return probe.batches[-1].submits[0]


def test_a_changed_text_is_shown_where_it_parts(tmp_path: Path) -> None:
    """Law: not lossless is said first, with the place, both tokens and the margin."""
    wrong = Mode("fixed", 4, ("grammar", "prediction", "draft_model"))
    lab = FakeLab(memory_bound, wrong=(wrong,))
    same, card = evaluate(lab, prompts(tmp_path))
    assert not same
    assert "NOT lossless" in card
    assert "draft K=4, 1 at a time, T=0: token 3 after" in card
    assert "is '!' instead of" in card
    assert "by 0.25" in card


def test_time_is_kept(tmp_path: Path) -> None:
    """Law: about the minutes given, however slow the model; then the replies are shorter, which is
    said."""
    slow = FakeLab(lambda load, k: 20 * memory_bound(load, k))
    out = tmp_path / "r.json"
    evaluate(slow, prompts(tmp_path), minutes=10.0, max_tokens=512, json=out)
    assert 300 < slow.now < 900
    assert "replies were cut, down to" in json.loads(out.read_text())["notes"][0]


def test_short_replies_are_said_to_tell_little(tmp_path: Path) -> None:
    """Bug: a proposer and a K were recommended from replies of 16 tokens without a word about it.
    Law: it is said with the advice, in the configuration that is written, too, with a time that
    does; replies that are as short as the caller wants them are not the time's fault."""
    slow, config, out = (lambda load, k: 20 * memory_bound(load, k)), tmp_path / "c", tmp_path / "r"
    files: dict[str, Any] = {"write_config": config, "json": out}
    _, card = evaluate(FakeLab(slow), prompts(tmp_path), minutes=1.0, max_tokens=512, **files)
    assert "replies of 16 tokens tell little" in card
    assert "replies of 16 tokens tell little" in config.read_text()
    cut = json.loads(out.read_text())["cut"]
    enough = float(cut["minutes"])
    _, card = evaluate(FakeLab(slow), prompts(tmp_path), minutes=enough, max_tokens=512, **files)
    assert "tell little" not in card
    assert 64 <= json.loads(out.read_text())["cut"]["tokens"] < 128
    _, card = evaluate(FakeLab(slow), prompts(tmp_path), minutes=10.0, max_tokens=16, **files)
    assert "tell little" not in card
    assert json.loads(out.read_text())["cut"] is None


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ({"prompt": "a", "temprature": 1}, ["line 5", "unknown field `temprature`"]),
        ({"prompt": "a", "temperature": 3}, ["line 5", "`temperature`"]),
        ({"prompt": "a" * 600}, ["line 5", "maximum context length is 512"]),
        ({"prompt": "a", "max_tokens": 0}, ["line 5", "`max_tokens` is 0"]),
        ({"prompt": "a", "speculation": {"enabled": False}}, ["line 5", "`speculation`"]),
        ({"prompt": ""}, ["line 5"]),
        ({"prompt": "\ud800"}, ["line 5", "surrogate"]),
        ({"messages": []}, ["line 5", "`messages`"]),
        ({**CHAT, "chat_template_kwargs": {"x": 1}}, ["line 5", "`chat_template_kwargs`"]),
        ({"prompt": "a", "structured_outputs": {"regex": "("}}, ["line 5", "cannot be honoured"]),
        ({"prompt": "~"}, ["line 5", "the engine does not want it"]),
    ],
)
def test_bad_bodies_are_one_sentence_and_nothing_is_written(
    tmp_path: Path, line: dict[str, Any], parts: list[str]
) -> None:
    """Law: the line, and the server's own words; no file. Bug: it was said after progress, and
    after the models had been loaded for nothing."""
    files: dict[str, Any] = {
        "html": tmp_path / "a",
        "json": tmp_path / "b",
        "write_config": tmp_path / "c",
    }
    lab, shown = FakeLab(memory_bound, refuse=ord("~")), list[str]()
    with pytest.raises(PromptsError) as caught:
        evaluate(lab, prompts(tmp_path, line), say=shown.append, **files)
    for part in parts:
        assert part in str(caught.value)
    # Its length and its wishes are the engine's to judge.
    needs_engine = "context length" in str(caught.value) or "engine" in str(caught.value)
    assert lab.opened == bool(shown) == needs_engine
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["p.jsonl"]


class _Page(HTMLParser):
    """Tags, open ones, and text outside of the style sheet."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self.open and self.open[-1] != tag:  # pragma: no cover
            raise AssertionError(f"</{tag}> closes <{self.open[-1]}>")
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_whole_and_loads_nothing(tmp_path: Path) -> None:
    """Law: well nested, no script, no address, prompts as text; a browser may load nothing."""
    out = tmp_path / "r.html"
    evaluate(FakeLab(memory_bound), prompts(tmp_path), html=out)
    written = out.read_text("utf-8")
    page = _Page()
    page.feed(written)
    assert page.open == []
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert not {"src", "href", "onerror"} & {name for name, _ in page.attributes}
    assert "url(" not in written
    assert "http" not in written.replace("http-equiv", "")
    assert EVIL in page.text
    assert page.tags.count("table") == 4
    for name in ("K=0", "draft K=4", "ngram + draft auto"):
        assert name in page.text
    assert "nan" not in written


def test_the_configuration_is_read_back_as_it_was_meant(tmp_path: Path) -> None:
    """Law: what is not about speculation stays as it was; no key is written down."""
    said = load_config(
        None,
        ["server.port=9", "server.api_key=secret", "server.admin_key=secret",
         'target.path=a "b" \\\n\u00e9',
         "cache.memory_fraction=0.5", "server.served_model_name=[\"x\", \"y\"]",
         "speculation.proposer.path=d", "speculation.trace=t"],
    )  # fmt: skip
    for contender in contenders(make_ready(k_max=8, proposers=("ngram", "draft_model")), []):
        speculation = recommended(said.engine, contender)
        best = Config(said.server, said.engine.model_copy(update={"speculation": speculation}))
        path = tmp_path / "c.toml"
        write_config(path, best, ["two\nlines"])
        assert "secret" not in path.read_text()
        found = load_config(path)
        assert found.engine == best.engine
        assert found.engine.speculation.trace == "t"
        keyless = {"api_key": None, "admin_key": None}
        assert found.server == said.server.model_copy(update=keyless)
    assert [p.name for p in tmp_path.iterdir()] == ["c.toml"]


def test_contenders_become_settings() -> None:
    """Law: a server with these settings does what the contender did."""
    said = EngineConfig.model_validate({"speculation": {"controller": {"k_max": 5}}})
    made = {
        c.name: recommended(said, c)
        for c in contenders(make_ready(k_max=8, proposers=("ngram", "draft_model")), [])
    }
    assert made[PLAIN].proposer == NoProposerConfig()
    assert made["draft K=2"].controller == FixedConfig(k=2)
    assert made["draft K=2"].companions == ("grammar", "prediction")
    assert made["draft auto"].companions == ("grammar", "prediction")
    assert made["ngram auto"].proposer == NgramConfig()
    assert made["ngram auto"].controller == AdaptiveConfig(k_max=5)
    assert made["ngram + draft auto"] == said.speculation


def test_a_configuration_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    """Law: what would not be read back as it was meant leaves the old file alone."""
    path = tmp_path / "c.toml"
    path.write_text("old")
    strange = Config(ServerConfig.model_construct(port=-1), EngineConfig())
    with pytest.raises(ConfigError):
        write_config(path, strange)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["c.toml"]
    with pytest.raises(ConfigError, match="cannot write"):
        write_config(tmp_path / "no" / "c.toml", Config(ServerConfig(), EngineConfig()))
    assert tomllib.loads(config_text(Config(ServerConfig(), EngineConfig())))["speculation"]


def test_without_a_proposer_ngram_is_tried(tmp_path: Path) -> None:
    """Law: a configuration without guesses is evaluated with those that need no model."""
    lab = FakeLab(memory_bound)
    lab.ready = make_ready(proposer="ngram", k_max=8, proposers=("grammar", "ngram"))
    config = load_config(None, ["speculation.proposer.kind=none"])
    _, card = evaluate(lab, prompts(tmp_path), served=config)
    assert lab.config.speculation.proposer == NgramConfig()
    assert "n-gram lookup was tried" in card
    assert "draft" not in card.replace("Foredraft", "")


def test_intervals_need_two_slices() -> None:
    """Law: one slice has no spread; more have one around their geometric mean."""
    assert Record([2.0]).interval is None
    low, high = Record([1.0, 4.0]).interval or (0, 0)
    assert Record([1.0, 4.0]).ratio == pytest.approx(2.0)
    assert low < 2.0 < high


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--prompts", "nowhere.jsonl"], "cannot read the prompts nowhere.jsonl"),
        (["--prompts", "p", "--html", "no/where.html"], "cannot write no/where.html"),
        (["--prompts", "p", "--html", "x", "--json", "x"], "--json names x, as --html does"),
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
    """Law: exit code 2 and a line on stderr, before anything is loaded."""
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("foredraft evaluate: ")
    assert said.count("\n") == 1
    assert part in said


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--prompts", "p", "--minutes", "0"],
        ["--prompts", "p", "--minutes", "nan"],
        ["--prompts", "p", "--concurrency", "1,x"],
        ["--prompts", "p", "--temperature", "3"],
        ["--prompts", "p", "--max-prompts", "-1"],
        ["--prompts", "p", "--threads", "0"],
    ],
)
def test_wrong_options_say_what_is_allowed(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: exit code 2 and one sentence. Bug: it stood below lines of usage."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("foredraft evaluate: ")
    assert said.count("\n") == 1


def test_options_are_keys_of_the_configuration() -> None:
    """Law: the child is started with them; what --set says goes before them."""
    options = ["--prompts", "p", "--target", "4", "--threads", "3"]
    parsed = build_parser().parse_args([*options, "--set", "attention=sdpa"])
    engine = load_config(None, overrides(parsed)).engine
    assert (engine.target.path, engine.threads, engine.attention) == ("4", 3, "sdpa")
    parsed = build_parser().parse_args([*options, "--set", "threads=2"])
    assert load_config(None, overrides(parsed)).engine.threads == 2


def test_a_bad_body_is_found_although_it_is_not_among_the_chosen(tmp_path: Path) -> None:
    """Bug: of a long file only the lines that were to run were read; the others passed."""
    path = prompts(tmp_path, {"prompt": "a", "temperature": 3}, {"prompt": "b"})
    with pytest.raises(PromptsError, match="line 5"):
        evaluate(FakeLab(memory_bound), path, max_prompts=1)


def test_more_requests_at_a_time_than_the_engine_takes(tmp_path: Path) -> None:
    """Law: the limit is named."""
    config = load_config(None, ["schedule.max_sequences=8"])
    with pytest.raises(EngineError, match="schedule.max_sequences = 8"):
        evaluate(FakeLab(memory_bound), prompts(tmp_path), served=config)
