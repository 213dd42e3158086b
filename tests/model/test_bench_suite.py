"""The benchmark's measurements on tiny models: what is counted, never how fast it was."""

from __future__ import annotations

import argparse
import json
from difflib import SequenceMatcher
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.lab.bench.suite import (
    K_MAX,
    TEMPERATURES,
    Size,
    concurrency,
    facts,
    main,
    old_file,
    overhead,
    prediction,
    schema_of,
    speed,
    structured,
)
from engine.lab.bench.suite_result import (
    ADAPTIVE,
    HF_PLAIN,
    NO_LOOKUP,
    PLAIN,
    PREDICTED,
    Result,
    card,
    part_lines,
)
from engine.lab.bench.turns import (
    EngineContender,
    Task,
    Totals,
    TransformersContender,
    load_plain,
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
    result = Result(facts=facts(pair, SIZE, PROMPTS))
    prompts = PROMPTS[: SIZE.prompts]
    speed("code", parsed, pair, prompts, SIZE, result)
    overhead(pair, PROMPTS, SIZE, result)
    concurrency(pair, PROMPTS, SIZE, result)
    prediction(pair, prompts, SIZE, result)
    found = result.of("code", 0.0)
    assert set(found) >= {PLAIN, "K=1", f"K={K_MAX}", ADAPTIVE, HF_PLAIN}
    assert result.texts_compared == len(TEMPERATURES) * SIZE.prompts * (3 + 5) + 64
    assert result.lossless
    assert found[HF_PLAIN].equal == SIZE.prompts
    assert found[PLAIN].ratio.value == found[PLAIN].tokens_per_round == 1.0
    per_round = found[f"K={K_MAX}"].tokens_per_round
    assert per_round is not None
    assert per_round > 1
    shares = [row.host_share for row in result.rows if row.part == "host"]
    assert len(shares) == 4
    assert all(share is not None and 0 < share < 1 for share in shares)
    streams = result.of("streams", 0.0)["at once"]
    assert streams.equal == streams.compared == 64
    assert json.loads(result.as_json())["lossless"]
    assert "texts equal to K=0: 96 of 96" in card(result)
    for t in TEMPERATURES:
        assert set(result.of("prediction", t)) == {PLAIN, ADAPTIVE, NO_LOOKUP, *PREDICTED}
    assert "old file" in card(result)


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
        EngineContender.of({}, pair=pair, tokens=50),
        TransformersContender(model=model, tokens=50),
    ):
        played = contender.run(Task(PROMPTS[:1]), Totals(), temperature=2.0, seed=1)
        assert len(played.replies[0]) == 50
        assert played.seconds > 0


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
    grammar = Grammar("json_schema", json.dumps(schema))
    tasks = [Task([[5 + i, 17]], grammar=grammar) for i in range(2)]
    result = Result(facts={})
    structured(pair, tasks, SIZE, result)
    assert result.of("JSON", 0.8).keys() >= {PLAIN, ADAPTIVE}
    assert result.texts_compared == len(TEMPERATURES) * 2 * 2
    assert result.lossless
    assert sum(line.startswith(ADAPTIVE) for line in part_lines(result)) == len(TEMPERATURES)
