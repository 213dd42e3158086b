"""Speculation never changes the output: the engine against a plain reference that shares no code.

Every engine below runs all sampling fields at once, as one mixed batch, greedy and seeded; each
reply must equal the reference's token for token, and its log-probabilities within 1e-4."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pytest

from engine.config import AnyProposer, EngineConfig
from engine.control.acceptance import Confidences
from engine.control.controller import Choice, FixedK, KController, Load
from engine.core import Engine
from engine.messages import Output, SamplingParams, Submit
from engine.model.eagle_head import Target, load_eagle
from engine.model.medusa_heads import load_heads
from engine.model.pair import Pair, load_pair
from engine.speculation.proposal import Proposal
from tests.support import eagle, medusa, tiny
from tests.support.drafters import Liar, Oracle, TreeOracle
from tests.support.reference import Reference, log_softmax

PROMPT = [5, 17, 9, 5, 17, 9, 40, 41, 42, 5, 17]
LENGTH = 20

FIELDS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(seed=1, max_tokens=LENGTH, temperature=0, ignore_eos=True),
    "plain": SamplingParams(seed=2, max_tokens=LENGTH, ignore_eos=True),
    "cold": SamplingParams(seed=3, max_tokens=LENGTH, temperature=0.3, ignore_eos=True),
    "hot": SamplingParams(seed=4, max_tokens=LENGTH, temperature=2.0, ignore_eos=True),
    "top_k": SamplingParams(seed=5, max_tokens=LENGTH, top_k=7, ignore_eos=True),
    "top_p": SamplingParams(seed=6, max_tokens=LENGTH, top_p=0.6, ignore_eos=True),
    "min_p": SamplingParams(seed=7, max_tokens=LENGTH, min_p=0.2, ignore_eos=True),
    "all filters": SamplingParams(
        seed=2**64 - 1, max_tokens=LENGTH, temperature=0.8, top_k=30, top_p=0.9, min_p=0.01
    ),
    "presence": SamplingParams(seed=8, max_tokens=LENGTH, presence_penalty=1.5),
    "frequency": SamplingParams(seed=9, max_tokens=LENGTH, frequency_penalty=-1.5),
    "repetition": SamplingParams(seed=10, max_tokens=LENGTH, repetition_penalty=1.7),
    "greedy penalties": SamplingParams(
        seed=11, max_tokens=LENGTH, temperature=0, presence_penalty=1, frequency_penalty=1,
        repetition_penalty=1.3, ignore_eos=True,
    ),
    "bias": SamplingParams(seed=12, max_tokens=LENGTH, logit_bias={3: 4.0, 9: -100.0, 77: 2.5}),
    "min_tokens": SamplingParams(
        seed=13, max_tokens=LENGTH, temperature=1.2, min_tokens=9, stop_token_ids=tuple(range(64))
    ),
    "stop ids": SamplingParams(seed=14, max_tokens=LENGTH, stop_token_ids=tuple(range(0, 128, 9))),
    "logprobs": SamplingParams(seed=15, max_tokens=LENGTH, logprobs=3),
    "salted": SamplingParams(seed=16, max_tokens=LENGTH, cache_salt="tenant"),
    "one token": SamplingParams(seed=17, max_tokens=1),
    "no token": SamplingParams(seed=18, max_tokens=0),
    "urgent": SamplingParams(seed=19, max_tokens=LENGTH, priority=-7),
    "patient": SamplingParams(seed=20, max_tokens=LENGTH, priority=7),
    "scored": SamplingParams(seed=21, max_tokens=LENGTH, prompt_logprobs=2, logprobs=0),
}  # fmt: skip

DRAFTERS: list[str] = [
    *(kind.model_fields["kind"].default for kind in get_args(AnyProposer)),
    "windowed",  # a draft model that attends to a few tokens
    "branches",  # a draft model with second-best tokens
]
KS: list[int | str] = [0, 1, 3, 8, "adaptive"]
VARIANTS: dict[str, dict[str, dict[str, object]]] = {
    "whole prompts": {},
    "chunks of 4": {"schedule": {"max_step_tokens": 40, "max_sequences": 18}},
    "no prefix cache": {"cache": {"prefix_caching": False}},
    "small blocks, preemption": {"cache": {"block_size": 4, "num_blocks": 40}},
}


@pytest.fixture(scope="module")
def reference(tiny_target: str, tiny_eos: list[int]) -> Reference:
    return Reference(tiny_target, tiny_eos)


@pytest.fixture(scope="module")
def expected(reference: Reference) -> dict[str, tuple[list[int], list[float]]]:
    return {name: reference.generate(PROMPT, params) for name, params in FIELDS.items()}


@pytest.fixture(scope="module")
def pair(tiny_target: str, tiny_draft: str, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    pair = load_pair(config_for(tiny_target, tiny_draft, "draft_model", 3, {}))
    return with_heads(pair, tmp_path_factory.mktemp("heads"))


def with_heads(pair: Pair, folder: Path) -> Pair:
    """Return the pair with random heads, which are right now and then."""
    words = pair.target.model.get_output_embeddings().weight
    path = medusa.save(medusa.random_heads(words), folder)
    pair = replace(pair, heads=load_heads(path, folder, words))
    return with_eagle(pair, folder / "eagle", eagle.random_head(words))


def with_eagle(pair: Pair, folder: Path, head: eagle.Weights, **config: object) -> Pair:
    model, width = pair.target.model, head["norm.weight"].shape[0]
    own = {"vocab_size": pair.target.vocab_size, "hidden_size": width, **config}
    path, embedding = eagle.save(head, folder, **own), model.get_input_embeddings().weight
    fits = Target(embedding, pair.target.vocab_size, width, len(pair.target.layers))
    return replace(pair, eagle=load_eagle(path, folder, fits))


Variant = dict[str, dict[str, object]]
Build = Callable[..., Engine]  # of a drafter, K, a variant and further arguments of Engine


@pytest.fixture(scope="module")
def build(pair: Pair, tiny_target: str, tiny_draft: str) -> Build:
    return builder_of(pair, tiny_target, tiny_draft)


def builder_of(pair: Pair, target: str, draft: str) -> Build:
    """Return what builds the engine of a drafter, a K and a variant."""
    own = load_pair(config_for(target, "", "self", 3, {}), pair.target)

    def build(drafter: str, k: int | str, variant: Variant, **more: Any) -> Engine:
        config = config_for(target, draft, drafter, k, variant)
        return Engine(config, pair=own if drafter == "self" else pair, **more)

    return build


ALONE: dict[str, dict[str, object]] = {
    "cache": {"block_size": 4},
    "speculation": {"companions": []},
}


def config_for(
    target: str, draft: str, drafter: str, k: int | str, variant: dict[str, dict[str, object]]
) -> EngineConfig:
    proposer: dict[str, object] = {"kind": drafter}
    cache: dict[str, object] = {"num_blocks": 512}
    if drafter in ("draft_model", "windowed", "foreign"):
        proposer = {"kind": "draft_model", "path": draft}
    if drafter == "windowed":
        proposer["sliding_window"] = 3
        cache["block_size"] = 4
    if drafter == "eagle":
        proposer["path"] = "given"
    if drafter == "self":
        proposer["layers"] = 1
    if drafter == "prediction":  # of the requests
        proposer["kind"] = "ngram"
    if drafter.endswith("branches"):  # with second-best draft tokens
        proposer = {"kind": "draft_model", "path": draft, "branches": 2}
    controller: dict[str, object] = {"kind": "fixed", "k": k}
    if k == "adaptive":
        controller = {"kind": "adaptive"}
    return EngineConfig.model_validate(
        {
            "target": {"path": target},
            "device": "cpu",
            "speculation": {
                "proposer": proposer,
                "controller": controller,
                "remembered_tokens": 4096 if drafter == "suffix" else 0,
                **variant.get("speculation", {}),
            },
            "cache": cache | variant.get("cache", {}),
            "schedule": variant.get("schedule", {}),
        }
    )


def submit_all(engine: Engine, prompt: list[int], fields: dict[str, SamplingParams]) -> None:
    for name, params in fields.items():
        engine.add(Submit(name, prompt, params, 0.0))


def run(engine: Engine, counts: Counter[str] | None = None) -> Iterator[Output]:
    """Run to the end. `counts`: receives preemptions, requests with a prefix hit ("hits"), and
    accepted draft tokens by proposer."""
    counts = Counter() if counts is None else counts
    for _ in range(10_000):
        if not engine.has_work:
            return
        outputs = engine.step()
        counts["preemptions"] += outputs.metrics.preemptions
        counts["hits"] += sum(bool(output.cached_tokens) for output in outputs.items)
        for name, (_, accepted) in outputs.metrics.by_proposer.items():
            counts[name] += accepted
        yield from outputs.items
    raise AssertionError("the engine did not finish")


class Replies:
    """Gathers outputs by request; refuses a second ending."""

    def __init__(self, outputs: Iterator[Output]) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[float]] = {}
        self.last: dict[str, Output] = {}
        for output in outputs:
            assert output.id not in self.last, "a request ended twice"
            self.tokens.setdefault(output.id, []).extend(output.tokens)
            if output.logprobs is not None:
                scores = [entry.logprob for entry in output.logprobs]
                self.logprobs.setdefault(output.id, []).extend(scores)
            if output.finish is not None:
                self.last[output.id] = output


def hold(replies: Replies, expected: dict[str, tuple[list[int], list[float]]]) -> None:
    """Check that tokens are equal and log-probabilities agree to 1e-4."""
    for name, (tokens, logprobs) in expected.items():
        assert replies.tokens[name] == tokens, name
        if name in replies.logprobs:
            assert replies.logprobs[name] == pytest.approx(logprobs, abs=1e-4), name


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_lossless(
    drafter: str,
    k: int | str,
    variant: str,
    build: Build,
    expected: dict[str, tuple[list[int], list[float]]],
) -> None:
    """Law: the text is a function of (target, seed, position), whatever the drafts, batches,
    chunks, cache hits or preemptions."""
    engine, counts = build(drafter, k, VARIANTS[variant]), Counter[str]()
    submit_all(engine, PROMPT, FIELDS)
    replies = Replies(run(engine, counts))
    hold(replies, expected)
    assert counts["preemptions"] or "preemption" not in variant
    gauges = engine.gauges()
    assert (gauges.num_running, gauges.num_waiting, gauges.blocks_used) == (0, 0, 0)
    proposed = sum(output.proposed for output in replies.last.values())
    if drafter == "none" or k == 0:
        assert proposed == 0
    elif k != "adaptive":
        assert counts[engine.ready.proposer] > 0


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_proposer_of_trees_says_so(
    drafter: str, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: `trees` of its configuration, from which the controller learns that K counts nodes."""
    engine, branched = build(drafter, 8, {}), list[bool]()
    main = engine._proposer._main
    propose = main.propose

    def watched(chunks: Any) -> list[Proposal]:
        found = propose(chunks)
        branched.extend(proposal.branches is not None for proposal in found)
        return found

    monkeypatch.setattr(main, "propose", watched)
    submit_all(engine, PROMPT, FIELDS)
    list(run(engine))
    assert any(branched) == engine._trees


OF_MIXTURES = ("greedy", "plain", "all filters", "greedy penalties", "logprobs", "scored")


class Mixture(NamedTuple):
    """A target of experts with its first layer as its draft, and random heads."""

    build: Build
    expected: dict[str, tuple[list[int], list[float]]]


@pytest.fixture(scope="module", params=["mixtral", "qwen3_moe"])
def mixture(
    request: pytest.FixtureRequest, tiny_eos: list[int], tmp_path_factory: pytest.TempPathFactory
) -> Mixture:
    model, folder = tiny.FAMILIES[request.param](), tmp_path_factory.mktemp(request.param)
    paths = tiny.save(model, folder / "target"), tiny.save(tiny.draft_of(model), folder / "draft")
    reference = Reference(paths[0], tiny_eos)
    expected = {name: reference.generate(PROMPT, FIELDS[name]) for name in OF_MIXTURES}
    pair = with_heads(load_pair(config_for(*paths, "draft_model", 3, {})), folder / "heads")
    return Mixture(builder_of(pair, *paths), expected)


@pytest.mark.parametrize("blocks", [512, 14], ids=["whole prompts", "small blocks, preemption"])
@pytest.mark.parametrize("k", [3, "adaptive"])
@pytest.mark.parametrize("drafter", DRAFTERS[1:])
def test_mixtures_of_experts(drafter: str, k: int | str, blocks: int, mixture: Mixture) -> None:
    """Law: the same holds for targets whose rows are routed to different experts."""
    variant: Variant = {"cache": {"block_size": 4, "num_blocks": blocks}}
    engine, counts = mixture.build(drafter, k, variant), Counter[str]()
    submit_all(engine, PROMPT, {name: FIELDS[name] for name in OF_MIXTURES})
    replies = Replies(run(engine, counts))
    hold(replies, mixture.expected)
    assert (counts["preemptions"] > 0) == (blocks < 512)
    proposed = sum(output.proposed for output in replies.last.values())
    assert k == "adaptive" or proposed > 0
    accepted = counts[engine.ready.proposer] > 0
    assert accepted or k == "adaptive" or drafter in ("ngram", "suffix")


@pytest.mark.parametrize("drafter", [name for name in DRAFTERS[1:] if name != "suffix"])
@pytest.mark.parametrize("k", [6, "adaptive"])
def test_earlier_replies_change_no_text(
    drafter: str,
    k: int | str,
    build: Build,
    expected: dict[str, tuple[list[int], list[float]]],
) -> None:
    """Law: the second run, when `suffix` has seen every reply, gives the same texts, and more of
    its draft tokens are accepted. On the clock here, further rows are free, so draft tokens pay."""
    variant: dict[str, dict[str, object]] = {
        "speculation": {"companions": ["suffix"], "remembered_tokens": 10_000}
    }
    ticks = map(float, count())
    engine = build(drafter, k, variant, clock=lambda: 1e-3 * next(ticks))
    kept = []
    for _ in range(2):
        submit_all(engine, PROMPT, FIELDS)
        replies = Replies(run(engine))
        hold(replies, expected)
        kept.append(sum(output.accepted for output in replies.last.values()))
    assert kept[1] > kept[0]


@pytest.mark.parametrize("drafter", ["draft_model", "medusa", "eagle"])
def test_proposals_are_timed_by_the_clock_of_the_engine(
    drafter: str, pair: Pair, tiny_target: str, tiny_draft: str
) -> None:
    """Bug: forwards of heads were timed by the wall, and in CPU seconds took longer than their
    step. Here a look at the clock is a second."""
    ticks = map(float, count())
    config = config_for(tiny_target, tiny_draft, drafter, 4, ALONE)
    engine = Engine(config, pair=pair, clock=lambda: next(ticks))
    submit_all(engine, PROMPT, {"a": SamplingParams(seed=3, max_tokens=8, ignore_eos=True)})
    steps = [engine.step().metrics.seconds for _ in range(4)]
    assert max(step.propose_forward for step in steps) >= 1
    assert all(step.propose_forward <= step.propose for step in steps)


def test_earlier_replies_are_proposed_to_their_own_key_only(
    pair: Pair, tiny_target: str, tiny_draft: str
) -> None:
    """Law: of three equal requests, only the one whose key has received the reply gains by it."""
    engine = Engine(config_for(tiny_target, tiny_draft, "suffix", 6, {}), pair=pair)
    params = SamplingParams(seed=3, max_tokens=LENGTH, temperature=1.0, ignore_eos=True)
    accepted = []
    for tenant in ("one", "another", "one"):
        engine.add(Submit("a", PROMPT, params, 0.0, tenant=tenant))
        accepted.append(Replies(run(engine)).last["a"].accepted)
    assert accepted[1] <= accepted[0] < accepted[2]


class Whims(FixedK):
    """Chooses K, stops drafting and cuts proposals at random."""

    def __init__(self, k_max: int, seed: int) -> None:
        super().__init__(k_max)
        self.random = random.Random(seed)
        self.stopped = self.cut = 0

    def choose(self, load: Load) -> Choice:
        return Choice(self.random.choice([0, 1, self.k_max, self.k_max]), "fixed")

    def keeps_drafting(self, confidences: Confidences) -> bool:
        keeps_drafting = self.random.random() < 0.7
        self.stopped += not keeps_drafting
        return keeps_drafting

    def kept_counts(self, confidences: Confidences) -> list[int]:
        kept = [self.random.randint(0, len(sure)) for sure in confidences]
        self.cut += sum(map(len, confidences)) - sum(kept)
        return kept


@pytest.mark.parametrize("variant", ["whole prompts", "small blocks, preemption"])
def test_trimming_and_stopping_change_no_text(
    variant: str,
    pair: Pair,
    tiny_target: str,
    tiny_draft: str,
    expected: dict[str, tuple[list[int], list[float]]],
) -> None:
    """Law: a controller that chooses, stops and cuts at random changes no token, and neither does
    the drafter's judging in hindsight."""
    config = config_for(tiny_target, tiny_draft, "draft_model", 6, VARIANTS[variant])
    engine, whims, counts = Engine(config, pair=pair), Whims(6, seed=5), Counter[str]()
    obey(engine, whims)
    submit_all(engine, PROMPT, FIELDS)
    replies = Replies(run(engine, counts))
    assert counts["preemptions"] or "preemption" not in variant
    assert replies.tokens == {name: tokens for name, (tokens, _) in expected.items()}
    assert whims.stopped
    assert whims.cut


def obey(engine: Engine, controller: KController) -> None:
    """Replace the configured controller."""
    engine._controller.configured = engine._controller._present = controller


@pytest.mark.parametrize("drafter", DRAFTERS[1:])
def test_a_proposer_alone_under_preemption(
    drafter: str, build: Build, expected: dict[str, tuple[list[int], list[float]]]
) -> None:
    """Law: the same holds for each proposer without companions; here a pool too small for the batch
    preempts, and draft tokens are accepted."""
    variant = {**VARIANTS["small blocks, preemption"], "speculation": ALONE["speculation"]}
    engine, counts = build(drafter, 3, variant), Counter[str]()
    submit_all(engine, PROMPT, FIELDS)
    hold(Replies(run(engine, counts)), expected)
    found = {name for name, count in counts.items() if count}
    assert found == {"preemptions", "hits", engine.ready.proposer}


@pytest.mark.parametrize("speculation", [{}, ALONE["speculation"]], ids=["cascade", "alone"])
@pytest.mark.parametrize("drafter", DRAFTERS[1:])
def test_copies_of_one_prompt(
    drafter: str, speculation: dict[str, object], build: Build, reference: Reference
) -> None:
    """Law: n choices of one prompt share its blocks from their very first step, and differ only by
    seed."""
    prompt = PROMPT * 5
    fields = {
        str(i): SamplingParams(seed=100 + i, max_tokens=12, ignore_eos=True) for i in range(4)
    }
    engine, counts = build(drafter, 4, {"speculation": speculation}), Counter[str]()
    submit_all(engine, prompt, fields)
    replies = Replies(run(engine, counts))
    assert counts["hits"] == len(fields) - 1
    for name, params in fields.items():
        assert replies.tokens[name] == reference.generate(prompt, params)[0]
    assert len({tuple(tokens) for tokens in replies.tokens.values()}) == len(fields)


@pytest.mark.parametrize("speculation", [{}, ALONE["speculation"]], ids=["cascade", "alone"])
@pytest.mark.parametrize("drafter", DRAFTERS[1:])
def test_prefix_cache_hit_changes_nothing(
    drafter: str, speculation: dict[str, object], build: Build, reference: Reference
) -> None:
    """Law: a prompt from the prefix cache gives the text that it gave when computed, and a request
    with another tenant's salt gets no hit."""
    prompt = PROMPT * 6
    engine = build(drafter, 4, {"speculation": speculation})
    fields = {"first": SamplingParams(seed=5, max_tokens=12, ignore_eos=True)}
    outputs = []
    for name, salt in [("first", ""), ("again", ""), ("other", "salt")]:
        fields = {name: SamplingParams(seed=5, max_tokens=12, ignore_eos=True, cache_salt=salt)}
        submit_all(engine, prompt, fields)
        outputs += list(run(engine))
    cached = {o.id: o.cached_tokens for o in outputs if o.cached_tokens is not None}
    assert cached["first"] == cached["other"] == 0
    assert cached["again"] is not None
    assert cached["again"] >= 48
    want = reference.generate(prompt, fields["other"])[0]
    assert Replies(iter(outputs)).tokens == {"first": want, "again": want, "other": want}


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("budget", [512, 5])
def test_prompt_logprobs(
    k: int, budget: int, pair: Pair, tiny_target: str, tiny_draft: str, reference: Reference
) -> None:
    """Law: prompt log-probabilities equal the reference's, however the prompt is chunked, also for
    the tokens of a cached prefix."""
    prompt = PROMPT * 3
    variant: dict[str, dict[str, object]] = {
        "schedule": {"max_step_tokens": budget, "max_sequences": 2},
        "cache": {"block_size": 4},
    }
    engine = Engine(config_for(tiny_target, tiny_draft, "draft_model", k, variant), pair=pair)
    params = SamplingParams(seed=1, max_tokens=3, temperature=0, prompt_logprobs=2)
    rows = [log_softmax(row) for row in reference.logits(prompt)]
    for name in ("cold", "warm"):
        submit_all(engine, prompt, {name: params})
        first = next(o for o in run(engine) if o.prompt_logprobs is not None)
        assert first.prompt_logprobs is not None
        assert len(first.prompt_logprobs) == len(prompt)
        assert first.prompt_logprobs[0] is None
        for position, entry in enumerate(first.prompt_logprobs[1:], start=1):
            assert entry is not None
            assert entry.token == prompt[position]
            assert entry.logprob == pytest.approx(rows[position - 1][entry.token], abs=1e-4)
            ranked = sorted(range(128), key=lambda i: -rows[position - 1][i])
            assert [token for token, _ in entry.top] == ranked[:2]
            assert entry.rank == ranked.index(entry.token) + 1
        list(run(engine))


@pytest.mark.parametrize("budget", [512, 5])
def test_a_prompt_is_scored_without_generating(
    budget: int, pair: Pair, tiny_target: str, tiny_draft: str, reference: Reference
) -> None:
    """Law: with max_tokens 0 the prompt is computed and scored and nothing is generated, even if it
    fills the context; its blocks are freed and stay in the prefix cache."""
    limit: dict[str, dict[str, object]] = {
        "schedule": {"max_step_tokens": budget, "max_sequences": 2}
    }
    engine = Engine(config_for(tiny_target, tiny_draft, "draft_model", 3, limit), pair=pair)
    prompt = [(7 * i) % 128 for i in range(engine.ready.max_model_len)]
    params = SamplingParams(seed=1, max_tokens=0, prompt_logprobs=0)
    submit_all(engine, prompt, {"full": params})
    submit_all(engine, [*prompt, 1], {"more than full": params})
    submit_all(engine, prompt[:40], {"unscored": SamplingParams(seed=1, max_tokens=0)})
    ends = {output.id: output for output in run(engine) if output.finish is not None}
    assert ends["more than full"].finish == "error"
    for name in ("full", "unscored"):
        assert (ends[name].finish, ends[name].tokens, ends[name].rounds) == ("length", [], 0)
    assert ends["unscored"].prompt_logprobs is None
    scores = ends["full"].prompt_logprobs
    assert scores is not None
    assert len(scores) == len(prompt)
    rows = [log_softmax(row) for row in reference.logits(prompt)]
    for position in range(1, len(prompt)):
        entry = scores[position]
        assert entry is not None
        assert entry.logprob == pytest.approx(rows[position - 1][prompt[position]], abs=1e-4)
    assert engine.gauges().blocks_used == 0
    submit_all(engine, prompt[:40], {"again": SamplingParams(seed=1, max_tokens=1)})
    assert next(run(engine)).cached_tokens == 32


@pytest.mark.parametrize("name", ["greedy", "plain", "greedy penalties"])
@pytest.mark.parametrize("k", [1, 3, 8])
def test_oracle(
    k: int,
    name: str,
    pair: Pair,
    tiny_target: str,
    tiny_draft: str,
    expected: dict[str, tuple[list[int], list[float]]],
) -> None:
    """Law: all draft tokens of a perfect drafter are accepted, in ceil(n / (K+1)) rounds."""
    tokens = expected[name][0]
    oracle = Oracle({name: PROMPT + tokens})
    last = replies_of(oracle, k, name, pair, (tiny_target, tiny_draft), tokens)
    assert last.rounds == math.ceil(len(tokens) / (k + 1))
    assert last.accepted == last.proposed == len(tokens) - last.rounds


@pytest.mark.parametrize("name", ["greedy", "plain", "greedy penalties"])
@pytest.mark.parametrize("k", [2, 4, 8])
def test_tree_oracle(
    k: int,
    name: str,
    pair: Pair,
    tiny_target: str,
    tiny_draft: str,
    expected: dict[str, tuple[list[int], list[float]]],
) -> None:
    """Law: an accepted path is kept wherever the tree branches: its KV is moved into order, and one
    node of each pair of siblings is accepted in every round that proposes."""
    tokens = expected[name][0]
    oracle = TreeOracle({name: PROMPT + tokens})
    last = replies_of(oracle, k, name, pair, (tiny_target, tiny_draft), tokens)
    assert last.accepted == len(tokens) - last.rounds >= len(tokens) // 2 - 1
    assert last.proposed <= 2 * last.accepted


def replies_of(
    oracle: Oracle, k: int, name: str, pair: Pair, paths: tuple[str, str], tokens: list[int]
) -> Output:
    """Run one request with this drafter, check its text, and return its last Output."""
    config = config_for(*paths, "draft_model", k, ALONE)
    engine = Engine(config, pair=pair, proposer=oracle)
    submit_all(engine, PROMPT, {name: FIELDS[name]})
    replies = Replies(run(engine))
    assert replies.tokens[name] == tokens
    return replies.last[name]


@pytest.mark.parametrize("k", [1, 3, 8])
def test_liar(
    k: int,
    pair: Pair,
    tiny_target: str,
    tiny_draft: str,
    expected: dict[str, tuple[list[int], list[float]]],
) -> None:
    """Law: a drafter that is always wrong costs rounds but changes nothing; all blocks are
    freed."""
    known = {name: PROMPT + tokens for name, (tokens, _) in expected.items()}
    config = config_for(tiny_target, tiny_draft, "draft_model", k, ALONE)
    engine = Engine(config, pair=pair, proposer=Liar(known, vocab_size=128))
    submit_all(engine, PROMPT, FIELDS)
    replies = Replies(run(engine))
    assert replies.tokens == {name: tokens for name, (tokens, _) in expected.items()}
    assert all(output.accepted == 0 for output in replies.last.values())
    assert sum(output.proposed for output in replies.last.values()) > 0
    assert engine.gauges().blocks_used == 0
