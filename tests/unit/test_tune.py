"""`foredraft tune` without an engine: intervals, early ends, the recommendation and its file."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from engine.config import DraftModelConfig, EngineConfig, NgramConfig, NoProposerConfig
from engine.errors import ConfigError
from engine.lab.comparison.figures import Reply, Run
from engine.lab.comparison.ratio import ratio, t_quantile
from engine.lab.comparison.workload import OFF, Arm, Lane, Request
from engine.lab.tune.measuring import Found, Measuring, loops
from engine.lab.tune.prompts import built_in, from_file, requests
from engine.lab.tune.report import as_dict, lines, sentence
from engine.lab.tune.settings import AGAIN, NGRAM, config_text, settings_of
from server.config import load_config

DRAFT, OTHER = Arm("auto", label="draft a"), Arm("auto", label="draft b")
ARMS = (OFF, AGAIN, NGRAM, DRAFT)
STEP = 0.03  # seconds per token of plain decoding
MINUTES = 5.0


class World:
    """measuring.Turns of a machine whose arms are `gains` times as fast as plain decoding. Texts
    vary in difficulty (`texts`: standard deviation of the gain's logarithm), each turn has `noise`,
    and the whole machine drifts."""

    def __init__(
        self, gains: Mapping[Arm, float], seed: int, *, texts: float = 0.2, noise: float = 0.03
    ) -> None:
        self.gains, self.texts, self.noise = gains, texts, noise
        self.rng, self.now, self.rounds = np.random.default_rng(seed), 0.0, 0
        self.signal_at = math.inf

    def clock(self) -> float:
        return self.now

    def warm(self, prompts: Sequence[str]) -> None:
        self.now += 0.5

    def round(
        self, arms: Sequence[Arm], lanes: Sequence[Lane], *, stop: Callable[[], bool]
    ) -> dict[Arm, Run]:
        self.rounds += 1
        runs = {arm: Run() for arm in arms}
        drift = 1 + 0.3 * math.sin(self.now / 40)
        longest = 0.0
        for lane, queue in enumerate(lanes):
            ends = dict.fromkeys(arms, 0.0)
            for request in queue:
                length = min(request.tokens, int(self.rng.geometric(1 / 120)))
                easy = self.rng.normal(0, self.texts)
                for arm in arms:
                    gain = self.gains.get(arm, 1.0)
                    step = STEP * drift / (gain if gain == 1 else gain * math.exp(easy))
                    took = length * step * self.rng.lognormal(0, self.noise)
                    reply = Reply(lane, request.seed, ends[arm], text=[*range(length)])
                    reply.arrivals += [
                        (ends[arm] + took * (at + 1) / length, 1) for at in range(length)
                    ]
                    runs[arm].replies.append(reply)
                    ends[arm] += took
            longest = max(longest, sum(ends.values()))
        self.now += longest
        return runs


def request_stream(longest: int = 200) -> Iterator[Request]:
    return requests([f"p{place}" for place in range(12)], (0.0, 1.0), longest, 0)


def found_in(world: World, *, arms: Sequence[Arm] = ARMS, minutes: float = MINUTES) -> Found:
    return Measuring(
        world, arms, request_stream(), many=4, exact=True, end=60 * minutes, clock=world.clock,
        stopped=lambda: world.now >= world.signal_at,
    ).run()  # fmt: skip


def true_gain(gain: float, texts: float) -> float:
    """Return the gain in total time over all texts, whose times are log-normal."""
    return gain / math.exp(texts**2 / 2)


def test_quantiles_are_those_of_the_tables() -> None:
    """Law: quantiles of Student's t equal those of the tables."""
    quantiles = {(0.975, 1): 12.706, (0.975, 2): 4.303, (0.975, 7): 2.365, (0.995, 4): 4.604,
                 (0.995, 30): 2.750, (0.9, 5): 1.476}  # fmt: skip
    for (share, freedom), value in quantiles.items():
        assert t_quantile(share, freedom) == pytest.approx(value, abs=6e-4)


@pytest.mark.parametrize("rounds", [6, 25])
def test_an_interval_holds_the_ratio_as_often_as_it_says(rounds: int) -> None:
    """Law: of 100 intervals at alpha 0.05, about 95 and at least 90 hold the true ratio of sums,
    even with replies of very different lengths."""
    held = 0
    for seed in range(400):
        rng = np.random.default_rng(seed)
        theirs = rng.gamma(2.0, 1.0, rounds)
        ours = theirs / 1.3 * rng.lognormal(0, 0.1, rounds)
        found = ratio(theirs.tolist(), ours.tolist(), alpha=0.05)
        held += found.low <= true_gain(1.3, 0.1) <= found.high
    assert 360 <= held <= 396


@pytest.mark.parametrize("gain", [0.95, 1.0, 1.4])
def test_the_answer_holds_in_nine_of_ten_worlds(gain: float) -> None:
    """Law: with early ends, several arms and a drifting machine, every arm's interval holds its
    true ratio in at least 90 of 100 runs, and no run exceeds its time."""
    held = 0
    for seed in range(100):
        world = World({NGRAM: 1.1, DRAFT: gain}, seed)
        found = found_in(world)
        true = {NGRAM: true_gain(1.1, 0.2), DRAFT: true_gain(gain, 0.2 if gain != 1 else 0.0)}
        held += all(
            found.against(OFF, arm).low <= value <= found.against(OFF, arm).high
            for arm, value in true.items()
        )
        assert world.now < 60 * MINUTES + 60
    assert held >= 90


def test_it_ends_early_where_all_is_clear() -> None:
    """Law: narrow intervals end it at the first look, after a third of the time; wide ones only at
    the end."""
    quiet = World({DRAFT: 1.5}, 1, texts=0.01, noise=0.002)
    assert sentence(found_in(quiet, minutes=60)).startswith("draft a, K auto: 1.5")
    assert quiet.now < 60 * 60 / 3 + 60
    noisy = World({DRAFT: 1.5}, 1, texts=0.4, noise=0.1)
    found_in(noisy)
    assert noisy.now >= 60 * MINUTES


def test_a_signal_ends_it_with_the_results_so_far() -> None:
    """Law: after the current round it ends with a sentence: an answer, or that none is known."""
    world = World({DRAFT: 1.5}, 2)
    world.signal_at = 150.0
    found = found_in(world)
    assert 150 <= world.now < 200
    assert sentence(found).startswith("draft a, K auto: 1.")
    early = World({DRAFT: 1.5}, 2)
    early.signal_at = 40.0
    assert sentence(found_in(early)).startswith("no answer yet: ")
    never = World({DRAFT: 1.5}, 2)
    never.signal_at = 0.0
    sentences = list(lines(found_in(never)))
    assert len(sentences) == 1
    assert sentences[0].startswith("no answer yet: ")


@pytest.mark.parametrize(
    ("gains", "best", "words"),
    [
        ({NGRAM: 1.05, DRAFT: 1.5, OTHER: 1.9}, OTHER, "draft b, K auto: 1."),
        ({NGRAM: 1.3, DRAFT: 0.97, OTHER: 0.9}, NGRAM, "n-gram, K auto: 1."),
        ({NGRAM: 1.0, DRAFT: 1.0, OTHER: 1.0}, OFF, "off: no difference found between speculation"),
        (
            {NGRAM: 0.8, DRAFT: 0.7, OTHER: 0.6},
            OFF,
            "off: speculation is slower here, at best n",
        ),
        ({NGRAM: 1.4, DRAFT: 1.401, OTHER: 1.399}, NGRAM, "n-gram, K auto: 1."),
    ],
)
def test_which_arm_is_recommended(gains: dict[Arm, float], best: Arm, words: str) -> None:
    """Law: the fastest draft wins if it beats both off and n-gram lookup, else n-gram lookup if it
    gains, else off. A draft that adds nothing to n-gram lookup is not recommended."""
    world = World(gains, 5, texts=0.03)
    found = found_in(world, arms=(*ARMS, OTHER))
    assert found.best() == best
    assert sentence(found).startswith(words)
    assert "of plain decoding at 1 request" in sentence(found)
    assert " at 4; " in sentence(found)


def test_a_wide_interval_is_no_answer() -> None:
    """Bug: after a few rounds it printed "off: no difference found" next to [0.15, 7.08]."""
    world = World({NGRAM: 1.0, DRAFT: 1.0}, 4, texts=0.5, noise=0.3)
    found = found_in(world, minutes=2)
    assert len(found.one.tokens) >= 4
    assert not found.is_answered
    assert sentence(found).startswith("no answer yet: ")
    assert sentence(found).endswith("; give more --minutes")


def test_a_useless_draft_is_hardly_ever_recommended() -> None:
    """Law: a draft that gains nothing by itself is chosen in at most 5 of 100 runs."""
    worlds = (World({NGRAM: 1.03, DRAFT: 1.02}, seed, texts=0.1) for seed in range(100))
    assert sum(found_in(world).best() == DRAFT for world in worlds) <= 5


def test_loops_are_found_and_reported() -> None:
    """Law: a loop is a piece of up to 32 tokens, three or more times at the end, 24 tokens or
    more."""
    text = list(range(100, 180))
    assert loops([*text, *[7] * 24])
    assert not loops([*text, *[7] * 23])
    assert loops([*text, *[*range(32)] * 3])
    assert not loops([*text, *[*range(33)] * 3])
    assert not loops([*text, *[*range(12)] * 2])
    assert not loops([*[7] * 60, *text])
    assert not loops([])
    world = World({DRAFT: 1.3}, 3)
    found = found_in(world)
    assert not any("loop" in line for line in lines(found))
    found.one.looped = found.one.replies // 2
    [warning] = [line for line in lines(found) if "loop" in line]
    assert warning.startswith(f"warning: {found.one.looped} of {found.one.replies} replies loop")


def test_every_arm_answers_and_half_a_round_counts() -> None:
    """Law: figures cover the tokens that all arms generated, even of a round cut short; a round in
    which an arm generated nothing does not count."""
    world = World({DRAFT: 2.0}, 4, texts=0.0, noise=0.0)
    found = found_in(world, minutes=1)
    lane = [Request("p", 0.0, 1, 50, ends=True)]
    runs = world.round(ARMS, [lane], stop=lambda: False)
    del runs[DRAFT].replies[0].arrivals[9:]
    before, tokens = len(found.one.tokens), sum(found.one.tokens)
    found.add(found.one, runs)
    assert sum(found.one.tokens) == tokens + 9
    assert found.against(OFF, DRAFT).value == pytest.approx(2.0, rel=0.01)
    runs[DRAFT].replies[0].arrivals.clear()
    found.add(found.one, runs)
    assert len(found.one.tokens) == before + 1


def test_figures_are_written_for_programs() -> None:
    """Law: all figures, with the sentence, are valid JSON."""
    found = found_in(World({DRAFT: 1.5}, 1))
    figures = json.loads(json.dumps(as_dict(found)))
    assert figures["sentence"] == sentence(found)
    one = figures["loads"][0]
    value, low, high = one["against_off"]["draft a"]
    assert low < value < high
    assert len(one["seconds"]["draft a"]) == len(one["tokens"])


def test_the_file_serves_what_was_recommended(tmp_path: Path) -> None:
    """Law: `foredraft serve` reads it; off has no proposer, n-gram no draft; odd paths survive."""
    path = 'a "b" \\\n\u00e9\x7f'
    settings = settings_of({"a": DraftModelConfig(path=path)})
    base = EngineConfig.model_validate({"target": {"path": path, "dtype": "float32"}, "threads": 2})
    assert "ngram" not in settings[DRAFT].companions  # Bug: its gains counted for any draft
    kinds = {OFF: NoProposerConfig, NGRAM: NgramConfig, DRAFT: DraftModelConfig}
    for arm, kind in kinds.items():
        config = base.model_copy(update={"speculation": settings[arm]})
        file = tmp_path / "c.toml"
        file.write_text(config_text(config, "a line"), encoding="utf-8")
        assert load_config(file).engine == config
        assert isinstance(config.speculation.proposer, kind)


def render(messages: Sequence[Mapping[str, object]]) -> str:
    return f"<{messages[-1]['content']}>"


def test_prompts_are_the_users(tmp_path: Path) -> None:
    """Law: prompts come from lines, paragraphs, objects with `prompt` or `messages`, or OpenAI's
    batch format; the seed determines the order."""
    file = tmp_path / "p"
    file.write_text("one\ntwo\n")
    assert sorted(from_file(str(file), render, 0, 9)) == ["<one>", "<two>"]
    file.write_text("one\ntwo\n\nthree\n")
    assert sorted(from_file(str(file), render, 0, 9)) == ["<one\ntwo>", "<three>"]
    message = {"messages": [{"role": "user", "content": "x"}], "temperature": 0.5}
    objects = [message, {"prompt": "raw"}, {"body": message, "url": "/v1/chat/completions"}]
    file.write_text("\n".join(map(json.dumps, objects)))
    assert sorted(from_file(str(file), render, 0, 9)) == ["<x>", "<x>", "raw"]
    file.write_text("\n".join(map(str, range(50))))
    orders = {tuple(from_file(str(file), render, seed, 20)) for seed in range(3)}
    assert {len(order) for order in orders} == {20}
    assert len(orders) == 3


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{}", " must be an object with .*: "),
        ('{"prompt": ""}', " must be an object with .*: "),
        ('{"prompt": 1}', " must be an object with .*: "),
        ('{"messages": []}', " must be an object with .*: "),
        ("no", " is not JSON"),
        ('{"prompt": "a", "prompt": "b"}', ": `prompt` is given twice"),
    ],
)
def test_mistakes_in_a_file_are_one_sentence(line: str, problem: str, tmp_path: Path) -> None:
    """Law: the error names the line and what it must be."""
    file = tmp_path / "p"
    file.write_text(f'{{"prompt": "a"}}\n{line}\n')
    with pytest.raises(ConfigError, match=f"line 2{problem}") as caught:
        from_file(str(file), render, 0, 9)
    assert "\n" not in str(caught.value)


def test_every_run_uses_all_built_in_prompts() -> None:
    """Bug: each seed chose half of them and repeated these, so runs differed by three times what
    their intervals allowed for."""
    first, second = (built_in(render, seed) for seed in range(2))
    assert first != second
    assert sorted(first) == sorted(second)


def test_every_prompt_meets_every_temperature() -> None:
    """Law: built-in prompts alternate between four kinds; in two passes each prompt is used at both
    temperatures; no seed repeats."""
    prompts = [*built_in(render, 0)[:8], "own"]
    assert len(set(prompts)) == 9
    made = list(itertools.islice(requests(prompts, (0.0, 1.0), 50, 7), 18))
    for prompt in prompts:
        assert {each.temperature for each in made if each.prompt == prompt} == {0.0, 1.0}
    assert len({request.seed for request in made}) == 18
    assert all(request.ends and request.tokens == 50 for request in made)
