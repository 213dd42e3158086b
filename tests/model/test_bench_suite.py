"""The benchmark's measurements on tiny models: what is counted, never how fast it was."""

from __future__ import annotations

import argparse
import json
from difflib import SequenceMatcher
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.lab.bench.suite.__main__ import build_contenders, facts, main
from engine.lab.bench.suite.contenders import EngineContender, TransformersContender, load_plain
from engine.lab.bench.suite.json_replies import Task, schema_of, structured
from engine.lab.bench.suite.measures import concurrency, overhead, race
from engine.lab.bench.suite.prediction import old_file, prediction
from engine.lab.bench.suite.result import (
    ADAPTIVE,
    HF_PLAIN,
    K_MAX,
    NO_LOOKUP,
    PLAIN,
    PREDICTED,
    TEMPERATURES,
    Result,
    Size,
    card,
    json_lines,
)
from engine.messages import Grammar
from engine.model.pair import Pair, load_pair
from tests.support import tiny, tiny_text

SIZE = Size(ks=(1, K_MAX), prompts=2, tokens=12, rounds=1, concurrent_tokens=6)
PROMPTS = [[5 + i, 17, 9, 5 + i, 17, 9, 40, 41] for i in range(64)]


@pytest.fixture(scope="module")
def parsed(tiny_target: str, tiny_draft: str) -> argparse.Namespace:
    return argparse.Namespace(target=tiny_target, draft=tiny_draft)


@pytest.fixture(scope="module")
def pair(parsed: argparse.Namespace) -> Pair:
    return load_pair(
        EngineConfig.model_validate(
            {
                "target": {"path": parsed.target},
                "device": "cpu",
                "speculation": {"proposer": {"path": parsed.draft}},
            }
        )
    )


def test_whole_benchmark_on_a_tiny_pair(parsed: argparse.Namespace, pair: Pair) -> None:
    """Law: every contender is measured, all of our texts are equal, and the page can be written."""
    result = Result(facts=facts(parsed, pair, SIZE, PROMPTS))
    race(build_contenders(parsed, pair, SIZE), PROMPTS[: SIZE.prompts], SIZE, result)
    overhead(pair, PROMPTS, SIZE, result)
    concurrency(pair, PROMPTS, SIZE, result)
    prediction(pair, PROMPTS[: SIZE.prompts], SIZE, result)
    assert set(result.rates) >= {PLAIN, "K=1", f"K={K_MAX}", ADAPTIVE, HF_PLAIN}
    assert result.texts_compared == len(TEMPERATURES) * SIZE.prompts * (4 + 6)
    assert result.lossless
    assert result.hf_texts_equal == SIZE.prompts
    assert result.ratios[PLAIN] == {0.0: 1.0, 0.8: 1.0}
    assert result.tokens_per_round[PLAIN] == {0.0: 1.0, 0.8: 1.0}
    assert result.tokens_per_round[f"K={K_MAX}"][0.0] > 1
    assert all(0 < share < 1 for share in result.host_share.values())
    assert result.concurrent["finished"] == result.concurrent["equal"] == 64
    assert json.loads(result.as_json())["lossless"]
    assert "texts equal to K=0: 40 of 40" in card(result)
    assert set(result.predicted) == {PLAIN, ADAPTIVE, NO_LOOKUP, *PREDICTED}
    assert "with a prediction: right" in card(result)


def test_the_old_file_is_the_reply_before_its_edits() -> None:
    """Law: what is predicted shares most of the reply, and parts from it in each of three ways."""
    reply = list(range(1000, 1256))
    old = old_file(reply)
    matches = SequenceMatcher(None, old, reply, autojunk=False)
    assert 0.85 < matches.ratio() < 0.97
    ways = {tag for tag, *_ in matches.get_opcodes()}
    assert ways == {"equal", "insert", "delete", "replace"}
    assert old_file([1, 2, 3]) == [1, 2, 3]


def test_end_of_text_does_not_end_a_contender(parsed: argparse.Namespace, pair: Pair) -> None:
    """Law: ours and transformers' do the same work: exactly the tokens asked for."""
    model = load_plain(parsed.target, pair.target.dtype, pair.target.device)
    for contender in (
        EngineContender("ours", {}, pair=pair, tokens=50),
        TransformersContender("theirs", model=model, tokens=50),
    ):
        reply, seconds = contender.run(PROMPTS[0], temperature=2.0, seed=1)
        assert len(reply) == 50
        assert seconds > 0


@pytest.mark.parametrize("given", [["--target", "/nowhere"], ["--cpu-seconds"]])
def test_a_mistake_is_a_sentence(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Law: exit code 2 and one line, no traceback."""
    assert main(given) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("foredraft bench suite: ")
    assert said.err.count("\n") == 1


def test_json_replies_are_compared_and_judged(tmp_path: Path) -> None:
    """Law: under a schema, too, every configuration says the same, each reply within its schema."""
    model = tiny_text.target()
    target = tiny_text.save(model, tmp_path / "target")
    draft = tiny_text.save(tiny.draft_of(model), tmp_path / "draft")
    said = {"target": {"path": target}, "speculation": {"proposer": {"path": draft}}}
    pair = load_pair(EngineConfig.model_validate({**said, "device": "cpu"}))
    schema = schema_of([{"name": "x", "true": 1, "ab": 0.5}])
    assert schema["items"]["required"] == ["name", "true", "ab"]
    schema["items"]["properties"]["name"]["maxLength"] = 3
    tasks = [Task([5 + i, 17], Grammar("json_schema", json.dumps(schema))) for i in range(2)]
    result = Result(facts={})
    structured(pair, tasks, SIZE, result)
    assert result.json_rates.keys() == result.json_ratios.keys() >= {PLAIN, ADAPTIVE}
    assert result.texts_compared == len(TEMPERATURES) * 2 * 2
    assert result.lossless
    assert len(list(json_lines(result))) == 3
