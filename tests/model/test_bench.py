"""`foredraft bench` on tiny models: which work runs and what is counted, never how fast it was."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from math import ceil
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.lab.bench.__main__ import main
from engine.lab.bench.assisted import NAMES, other_arms
from engine.lab.bench.offline import ALL, PROPOSERS, Offline, in_turns
from engine.lab.comparison.figures import Reply, Run
from engine.lab.comparison.race import Race
from engine.lab.comparison.workload import AUTO, Arm, Workload, lanes, parse_arms
from engine.model.pair import Pair, load_pair
from tests.support import eagle, tiny, tiny_text

ARMS = parse_arms("off,2,auto")
POOLS = {"code": ["def f(x):", "import os"]}
TWO = Workload("code", 1.0, 2, tokens=9)


@pytest.fixture(scope="module")
def config(tiny_target: str, tiny_draft: str) -> EngineConfig:
    return EngineConfig.model_validate(
        {
            "target": {"path": tiny_target},
            "device": "cpu",
            "speculation": {"proposer": {"path": tiny_draft}},
        }
    )


@pytest.fixture(scope="module")
def pair(config: EngineConfig) -> Pair:
    return load_pair(config)


def encode(text: str) -> list[int]:
    return [b % 50 for b in text.encode()]


@pytest.fixture(scope="module")
def player(config: EngineConfig, pair: Pair) -> Offline:
    return Offline(config, pair, encode, ARMS, concurrency=4, prompts=4)


def test_a_variant_of_auto_is_played_live(config: EngineConfig, pair: Pair) -> None:
    """Law: its texts are those of auto. A variant without exploration never plays a K that is not
    believed to pay."""
    arms = parse_arms("off,auto,no exploration", variants=["no exploration"])
    player = Offline(config, pair, encode, arms, concurrency=2, prompts=4)
    comparison = Race(arms, [Workload("code", 1.0, 2, 48)], POOLS, rounds=1).run(player)
    assert comparison.texts_equal == comparison.texts_compared > 0
    played: list[Any] = [player.engines[arm][0]._controller.configured for arm in arms[1:]]
    explored = [each._explore.while_off(1.0, alone=True) for each in played for _ in range(64)]
    assert "trial" in explored[:64]
    assert set(explored[64:]) == {"usual"}


def test_every_proposer_is_played_alone_and_all_together(config: EngineConfig, pair: Pair) -> None:
    """Law: over one target all proposers give the same texts, and only the named one guesses; in
    `all` the draft and every companion do."""
    heads = ("medusa", "eagle")  # none exist for this target
    names = [each for each in (ALL, *PROPOSERS) if each not in heads]
    arms = parse_arms(f"off,{','.join(names)}", variants=names)
    player = Offline(config, pair, encode, arms, concurrency=2, prompts=4)
    comparison = Race(arms, [Workload("code", 0.0, 2, 24)], POOLS, rounds=1).run(player)
    assert comparison.texts_equal == comparison.texts_compared > 0
    both, *each = (player.engines[arm][0] for arm in arms[1:])
    assert both.ready.default_proposers == (
        "grammar", "prediction", "suffix", "ngram", "draft_model",
    )  # fmt: skip
    for arm, engine in zip(arms[2:], each, strict=True):
        assert engine._runner.model is pair.target
        assert arm.label in engine.ready.default_proposers
        assert len(engine.ready.default_proposers) == (2 if arm.label == "prediction" else 1)


def test_every_arm_does_the_same_work(player: Offline) -> None:
    """Law: real engines give equal texts, K follows the arm, and nothing is left running."""
    chosen = [Workload("code", 0.0, 2, 9), Workload("code", 1.0, 2, 9), Workload("code", 1.0, 4, 9)]
    comparison = Race(ARMS, chosen, POOLS, rounds=2).run(player)
    assert comparison.exact
    assert comparison.texts_equal == comparison.texts_compared > 0
    for cell in comparison.cells:
        count = cell.workload.concurrency
        assert set(cell.first_tokens) == set(ARMS)
        assert all(len(waits) == count for waits in cell.first_tokens.values())
        off, two, auto = (cell.rounds[arm][0] for arm in ARMS)
        assert off.mean_k == 0
        assert off.tokens_per_round == 1.0
        assert off.acceptance == []
        assert two.mean_k is not None
        assert 1 < two.mean_k <= 2  # the last draft token of a reply has no room
        assert 0 < two.acceptance[0] <= 1
        first = ceil(9 / count)  # tokens of the lane that ends first
        most, step = count * (first + 2 * 9), count * 3
        least = min(arm.tokens for arm in (off, two, auto))  # equal for all arms, up to one step
        assert most / 2 < least <= most
        assert all(arm.tokens - least < step for arm in (off, two, auto))
        assert off.between is not None
        assert off.host is not None
        assert 0 < off.host < 1
        assert all(run.rate > 0 for run in (off, two, auto))
    assert not any(engine.has_work for engine, _ in player.engines.values())


def test_a_run_ends_with_its_first_lane(player: Offline) -> None:
    """Law: lanes that are still busy are cut off, and their text is a prefix of the reply."""
    plan = lanes(TWO, POOLS, 0)
    two, off = Arm("fixed", 2), Arm("off")
    whole = player.round([two], plan)[two]
    short = player.round([off], [plan[0], plan[1][:1]])[off]
    assert [len(reply.text) for reply in whole.replies].count(9) >= 3
    lengths = [len(reply.text) for reply in _by_lane(short, 0)]
    assert sum(lengths) in (9, 10)  # the other lane's only reply had 9
    assert _by_lane(short, 0)[0].text == _by_lane(whole, 0)[0].text


def _by_lane(run: Run, lane: int) -> list[Reply]:
    return [reply for reply in run.replies if reply.lane == lane]


def test_auto_learns_from_its_own_traffic_alone(player: Offline) -> None:
    """Law: runs at a fixed K leave the engine of auto unchanged."""
    plan = lanes(TWO, POOLS, 0)
    player.round([AUTO], plan)
    engine, _ = player.engines[AUTO]
    before = engine.gauges().step
    player.round([Arm("fixed", 2)], plan)
    assert engine.gauges().step == before


def test_arms_take_turns(player: Offline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: within a round, arms take turns of a few tokens, and the clock of an arm stops during
    the turns of others, so that a slow second of the machine affects all arms alike."""
    monkeypatch.setattr("engine.lab.bench.offline.TURN", 0.0)  # a turn is one step
    turns: list[Arm] = []
    for arm, (_, clock) in player.engines.items():
        monkeypatch.setattr(clock, "start", _noting(arm, turns, clock.start))
    before = {arm: clock() for arm, (_, clock) in player.engines.items()}
    runs = player.round(ARMS, lanes(TWO, POOLS, 0))
    assert list(runs) == list(ARMS)
    assert set(turns[:3]) == set(turns[3:6]) == set(ARMS)
    for arm, run in runs.items():
        _, clock = player.engines[arm]
        at = clock()
        assert clock() == at  # no arm has its turn
        last = max(reply.arrivals[-1][0] for reply in run.replies if reply.arrivals)
        assert 0 < last <= at - before[arm]


def _noting(arm: Arm, turns: list[Arm], start: Callable[[], None]) -> Callable[[], None]:
    def noted() -> None:
        turns.append(arm)
        start()

    return noted


def test_transformers_does_the_same_work(
    config: EngineConfig, pair: Pair, tiny_target: str, tiny_draft: str
) -> None:
    """Law: exactly the requested number of tokens is generated, past any end of text; greedy texts
    need not be equal; a prompt's tokens count where no prefix cache holds them."""
    arms = parse_arms(f"off,{','.join(NAMES)}", NAMES)
    others = other_arms(pair, arms, tiny_target, tiny_draft)
    player = Offline(config, pair, encode, arms, concurrency=1, prompts=2, others=others)
    workload = Workload("code", 2.0, 1, tokens=8)
    comparison = Race(arms, [workload], POOLS, rounds=1).run(player)
    [cell] = comparison.cells
    assert {runs[0].tokens for runs in cell.rounds.values()} == {4 * 8}
    assert comparison.texts_compared == 0
    assert cell.fastest("other") in arms[1:]
    assert all(waits[0] > 0 for waits in cell.first_tokens.values())


def test_arms_share_one_memory_in_turns(player: Offline) -> None:
    """Bug: an arm with KV planes of its own was up to 15 % slower for a whole process."""
    engines = [engine for engine, _ in player.engines.values()]
    caches = [engine._cache for engine in engines]
    assert all(cache.planes is caches[0].planes for cache in caches)
    owned = [block for cache in caches for block in cache.blocks]
    assert sorted(owned) == list(range(caches[0].num_blocks))
    for cache, engine in zip(caches, engines, strict=True):
        ready = engine.ready
        assert ready.num_blocks == engine.gauges().blocks_total == len(cache.blocks)
        assert ready.memory["KV of the target"] * len(caches) == caches[0].planes["target"].nbytes


@pytest.mark.parametrize(("arms", "least", "run"), [(1, 7, 3), (3, 12, 4), (6, 13, 5)])
def test_runs_of_blocks_go_round_the_arms(arms: int, least: int, run: int) -> None:
    """Law: each arm has at least as many blocks as asked, every block has one arm, and the arm of a
    run's first block has the whole run but not the next one."""
    shares = in_turns(arms, least, run)
    assert {len(own) for own in shares} == {-(-least // run) * run}
    whose = {block: arm for arm, own in enumerate(shares) for block in own}
    assert sorted(whose) == list(range(sum(len(own) for own in shares)))
    assert all(arm == block // run % arms for block, arm in whose.items())


def test_a_prompt_without_tokens_is_a_sentence(config: EngineConfig, pair: Pair) -> None:
    """Law: the refusal comes before any measurement, and is not an assertion of the engine."""
    player = Offline(config, pair, lambda text: [], ARMS, concurrency=2, prompts=1)
    with pytest.raises(ConfigError, match="a prompt has no tokens"):
        player.warm(["x"])


def test_the_command_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Law: a card for people, JSON for programs, exit code 0."""
    model = tiny_text.target()
    target = tiny_text.save(model, tmp_path / "target")
    draft = tiny_text.save(tiny.draft_of(model), tmp_path / "draft")
    found = tmp_path / "found.json"
    words = ["--target", target, "--draft", draft, "--device", "cpu", "--modes", "off,1,auto",
             "--kinds", "random", "--temperatures", "1", "--concurrency", "2", "--rounds", "1",
             "--tokens", "4", "--json", str(found)]  # fmt: skip
    assert main(words) == 0
    stdout = capsys.readouterr().out
    assert "random T=1 x2" in stdout
    compared = re.search(r"texts equal across modes: (\d+) of (\d+)", stdout)
    assert compared is not None
    assert compared[1] == compared[2]
    assert int(compared[1]) >= 8  # a reply that some mode did not begin is not compared
    assert json.loads(found.read_text())["texts_equal"] == int(compared[1])


def test_a_named_head_is_an_arm_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: all proposers that the options give are compared. Bugs: `--eagle` had no arm
    `eagle`; its arm `tree` ended in a traceback."""
    model: Any = tiny_text.target()
    target = tiny_text.save(model, tmp_path / "target")
    draft = tiny_text.save(tiny.draft_of(model), tmp_path / "draft")
    weights = eagle.random_head(model.get_output_embeddings().weight)
    head = eagle.save(weights, tmp_path / "head", vocab_size=tiny_text.vocab_size())
    words = ["proposers", "--target", target, "--draft", draft, "--device", "cpu", "--kinds",
             "random", "--temperatures", "0", "--concurrency", "1", "--rounds", "1", "--tokens",
             "4", "--json", str(tmp_path / "found.json")]  # fmt: skip
    for more in ([], ["--eagle", head]):
        assert main([*words, *more]) == 0
        found = json.loads((tmp_path / "found.json").read_text())
        assert found["texts_equal"] == found["texts_compared"] > 0
        names = [each for each in PROPOSERS if each != "medusa" and (more or each != "eagle")]
        assert found["modes"] == ["off", "auto", ALL, *names]
    assert main([*words, "--modes", "off,eagle"]) == 2
    assert "unknown mode 'eagle'" in capsys.readouterr().err
    assert main([*words, "--eagle", head, "--modes", "off,tree"]) == 2, "a tree of a draft"
    assert "unknown mode 'tree'" in capsys.readouterr().err


def test_mistakes_are_one_line_and_exit_code_two(capsys: pytest.CaptureFixture[str]) -> None:
    """Law: one sentence on stderr, nothing on stdout."""
    for words in (
        ["--target", "/nowhere", "--quick"],
        ["--modes", "64"],
        ["--draft", "self:0"],
        ["--medusa", "demo", "--draft", "/nowhere", "--modes", "off,draft_model"],
        ["--modes", "transformers", "--concurrency", "1"],
        ["--modes", "off,assisted", "--concurrency", "1,4"],
        ["suite", "--cpu-seconds"],
    ):
        assert main(words) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("foredraft bench")
        assert captured.err.count("\n") == 1
