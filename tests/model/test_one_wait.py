"""Steps in which the host waits for the device once, against ordinary steps: the same texts and
outcomes with a single copy. On a CPU, with a recorder that re-runs functions on replay."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch

from engine.attention.flashinfer import FlashInferBackend
from engine.config import EngineConfig
from engine.control.controller import Choice, FixedK, Load
from engine.core import Engine
from engine.messages import Output, SamplingParams, Speculation, StepSeconds, Submit
from engine.model.kv_cache import KVCache
from engine.model.loaded import LoadedModel, ModuleCall
from engine.model.loader import load_model
from engine.model.pair import Pair
from engine.model.runner import Graphs, ModelRunner
from engine.sampling.device_draws import DeviceDraws
from engine.scheduling.step_plan import StepPlan
from engine.step.clock import Stopwatch
from tests.model.test_lossless import FIELDS as ALL_FIELDS
from tests.model.test_lossless import Replies, obey, run
from tests.support.drafters import Listener
from tests.support.fake_flashinfer import PagedPrefill
from tests.support.fake_recorder import FakeRecorder
from tests.support.reference import Reference
from tests.support.waits import Waits

CPU = torch.device("cpu")
BLOCK, BLOCKS = 4, 80
PROMPT = [5, 17, 9, 5, 17, 9, 40, 41, 42, 5, 17]
STOPS = tuple(range(3, 120, 11))
MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="module")
def pair(tiny_target: str, tiny_draft: str) -> Pair:
    target = load_model(tiny_target, role="target", device="cpu")
    return Pair(target, load_model(tiny_draft, role="draft", device="cpu"))


@pytest.fixture
def make(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> MakeEngine:
    """Return a maker of engines as on CUDA: graphs, and draws on the logits' device; with
    `usual=False`, all steps take the ordinary path."""
    monkeypatch.setattr("engine.core.build_draws", DeviceDraws)

    def made(
        k: int = 4,
        *,
        usual: bool = True,
        twin: bool = False,
        companions: Seq[str] = (),
        **more: Any,
    ) -> Engine:
        draft = load_twin(pair) if twin else pair.draft
        assert draft is not None
        cache = KVCache(BLOCKS, BLOCK, "cpu", padding_block=True)

        def runner(
            config: EngineConfig, model: LoadedModel, *_: object, **__: object
        ) -> ModelRunner:
            graphs = Graphs(FakeRecorder(), 24)
            runner = ModelRunner(
                replace(model, logits=ModuleCall(model.model)),
                cache,
                model.role,
                backend=FlashInferBackend(CPU, PagedPrefill),
                graphs=graphs,
            )
            runner._compiled = None
            return runner

        monkeypatch.setattr("engine.core.runner_of", runner)
        config = {
            "target": {"path": pair.target.path},
            "device": "cpu",
            "cache": {"block_size": BLOCK, "num_blocks": BLOCKS},
            "speculation": {
                "proposer": {"path": draft.path},
                "controller": {"kind": "fixed", "k": k},
                "companions": list(companions),
            },
            **more,
        }
        engine = Engine(EngineConfig.model_validate(config), pair=Pair(pair.target, draft))
        engine._cache = cache  # the runners'
        if not usual:
            engine._rounds._draft = None
        return engine

    return made


def load_twin(pair: Pair) -> LoadedModel:
    """Load a draft that is always right."""
    return load_model(pair.target.path, role="draft", device="cpu", dtype="float32")


def params(i: int, **fields: Any) -> SamplingParams:
    settings = {"seed": i, "max_tokens": 9 + i, "temperature": i / 2, **fields}
    return SamplingParams(**settings)


def steps_of(engine: Engine, requests: list[SamplingParams]) -> list[tuple[list[Output], Any]]:
    """Return every step's outputs and counts, without durations."""
    for i, fields in enumerate(requests):
        engine.add(Submit(str(i), PROMPT[: 5 + i], fields, 0.0))
    steps = []
    while engine.has_work:
        outputs = engine.step()
        metrics = msgspec.structs.replace(outputs.metrics, seconds=StepSeconds())
        steps.append((untimed(outputs.items), metrics))
    return steps


def texts_of(steps: list[tuple[list[Output], Any]]) -> dict[str, list[int]]:
    """Return each request's tokens."""
    found: dict[str, list[int]] = {}
    for items, _ in steps:
        for item in items:
            found.setdefault(item.id, []).extend(item.tokens)
    return found


def untimed(items: list[Output]) -> list[Output]:
    """Return the outputs without their queue times."""
    return [msgspec.structs.replace(item, queued=None) for item in items]


def logprobs_in(step: tuple[list[Output], Any]) -> list[float]:
    """Return the step's log-probabilities, whose last bits vary with the number of rows."""
    each = [one for output in step[0] for one in output.logprobs or ()]
    return [number for one in each for number in (one.logprob, *(top for _, top in one.top))]


def without_logprobs(step: tuple[list[Output], Any]) -> tuple[list[Any], Any]:
    """Return the step without log-probability values, but with their ids and ranks."""
    outputs, metrics = step
    ids = [
        [(one.token, one.rank, [token for token, _ in one.top]) for one in output.logprobs or ()]
        for output in outputs
    ]
    bare = [msgspec.structs.replace(output, logprobs=None) for output in outputs]
    return [*zip(bare, ids, strict=True)], metrics


class Counted:
    """Counts the single-wait steps among the steps that had a draft to ask."""

    def __init__(self, engine: Engine) -> None:
        self.once = self.other = self.looked_up = 0
        self._way, self._cascade = engine._rounds._with_one_wait, engine._proposer
        engine._rounds._with_one_wait = self  # type: ignore[method-assign]

    def __call__(self, plan: StepPlan, seconds: StepSeconds, stopwatch: Stopwatch) -> Any:
        found = self._way(plan, seconds, stopwatch)
        self.once += found is not None
        self.looked_up += found is not None and any(s.proposal.source == "ngram" for s in found)
        _, left = self._cascade.look_up(plan.chunks)
        self.other += found is None and any(chunk.k for chunk in left)
        return found


@pytest.mark.parametrize("twin", [False, True])
@pytest.mark.parametrize("k", [1, 4])
def test_every_step_is_the_same(make: MakeEngine, k: int, twin: bool) -> None:
    """Law: texts, endings and counts do not show which path a step took. Covers prompts of several
    lengths, temperatures, and drafts that are right, wrong or end early."""
    requests = [params(i, ignore_eos=i != 2, stop_token_ids=STOPS) for i in range(4)]
    ours, theirs = (make(k, usual=usual, twin=twin) for usual in (True, False))
    counted = Counted(ours)
    steps, other = steps_of(ours, requests), steps_of(theirs, requests)
    found, expected = (list(map(logprobs_in, each)) for each in (steps, other))
    assert found == [pytest.approx(each, abs=1e-5) for each in expected]
    assert [without_logprobs(step) for step in steps] == [without_logprobs(step) for step in other]
    assert counted.once
    assert not counted.other
    assert any(metrics.num_accepted for _, metrics in steps)
    assert k == 1 or any(any(metrics.k_counts[1:k]) for _, metrics in steps)  # ended early


FIELDS: dict[str, dict[str, Any]] = {
    "top_p": {"top_p": 0.8},
    "filters": {"top_k": 40, "top_p": 0.9, "min_p": 0.02},
    "presence and frequency": {"presence_penalty": 1.5, "frequency_penalty": -0.7},
    "repetition": {"repetition_penalty": 1.7},
    "bias": {"logit_bias": {3: 4.0, 9: -100.0, 77: 2.5}},
    "min_tokens": {"min_tokens": 7, "stop_token_ids": STOPS},
    "logprobs": {"logprobs": 3},
    "everything": {
        "top_k": 60, "top_p": 0.95, "presence_penalty": 0.5, "frequency_penalty": 0.3,
        "repetition_penalty": 1.3, "logit_bias": {5: 2.0}, "logprobs": 0, "min_tokens": 3,
    },
}  # fmt: skip


@pytest.mark.parametrize("everybody", [True, False])
@pytest.mark.parametrize("twin", [False, True])
@pytest.mark.parametrize("name", FIELDS)
def test_no_field_makes_the_host_wait_in_between(
    make: MakeEngine, name: str, twin: bool, everybody: bool
) -> None:
    """Law: steps take the single-wait path whether all sequences set a field, or some, or none, and
    equal the ordinary path, draft token by draft token and log-probability by log-probability."""
    fields = [FIELDS[name] if everybody or i % 2 else {} for i in range(4)]
    requests = [params(i, **{"max_tokens": 14, **more}) for i, more in enumerate(fields)]
    ours, theirs = (make(3, usual=usual, twin=twin) for usual in (True, False))
    counted = Counted(ours)
    steps, other = steps_of(ours, requests), steps_of(theirs, requests)
    found, expected = (list(map(logprobs_in, each)) for each in (steps, other))
    assert found == [pytest.approx(each, abs=1e-5) for each in expected]
    assert [without_logprobs(step) for step in steps] == [without_logprobs(step) for step in other]
    assert counted.once
    assert not counted.other
    assert any(metrics.num_accepted for _, metrics in steps)


def test_it_is_lossless(make: MakeEngine, tiny_target: str, tiny_eos: list[int]) -> None:
    """Law: the text equals that of a reference without shared code, under all fields at once."""
    reference = Reference(tiny_target, tiny_eos)
    for k, twin in ((4, True), (2, False), (0, False)):
        engine = make(k, twin=twin)
        for name, sampling_params in ALL_FIELDS.items():
            engine.add(Submit(name, PROMPT, sampling_params, 0.0))
        replies = Replies(run(engine))
        for name, sampling_params in ALL_FIELDS.items():
            tokens, logprobs = reference.generate(PROMPT, sampling_params)
            assert replies.tokens[name] == tokens, name
            if name in replies.logprobs:
                assert replies.logprobs[name] == pytest.approx(logprobs, abs=1e-4), name


BOUNDS: list[dict[str, Any]] = [
    {"max_tokens": 90}, {"max_tokens": 11, "top_p": 0.9}, {"max_tokens": 14, "logprobs": 1},
    {"max_tokens": 17, "presence_penalty": 0.5}, {"speculation": Speculation(max_draft=1)},
    {"speculation": Speculation(max_draft=3)}, {"speculation": Speculation(max_draft=0)},
    {"speculation": Speculation(proposers=("ngram",))}, {"max_tokens": 1},
]  # fmt: skip
NEARLY_FULL = [7 * i % 120 for i in range(243)]  # of 256 positions


@pytest.mark.parametrize("companions", [(), ("ngram",)])
@pytest.mark.parametrize("twin", [False, True])
def test_sequences_may_have_fewer_draft_tokens_than_others(
    make: MakeEngine, twin: bool, companions: tuple[str, ...]
) -> None:
    """Law: at the ends of texts, at the context limit, and where requests bound or disable
    speculation, a step waits once, and texts, endings and counts equal those of the ordinary path,
    in which a proposal has at most its sequence's own K tokens."""

    def steps(engine: Engine) -> list[tuple[list[Output], Any, list[str]]]:
        for i, fields in enumerate(BOUNDS):
            more = {"max_tokens": 24, "ignore_eos": True, **fields}
            prompt = PROMPT[: 5 + i] if i else NEARLY_FULL
            engine.add(Submit(str(i), prompt, params(i, **more), 0.0))
        found = []
        while engine.has_work:
            with Waits() as waits:
                outputs = engine.step()
            seen = [name for name in waits.seen if name != "numpy"]
            metrics = msgspec.structs.replace(outputs.metrics, seconds=StepSeconds())
            found.append((untimed(outputs.items), metrics, seen if metrics.num_proposed else []))
        return found

    engine = make(4, twin=twin, companions=companions)
    counted = Counted(engine)
    ours, theirs = steps(engine), steps(make(4, twin=twin, companions=companions, usual=False))
    assert [[output.tokens for output in items] for items, *_ in ours] == [
        [output.tokens for output in items] for items, *_ in theirs
    ]
    if not companions:
        assert [metrics for _, metrics, _ in ours] == [metrics for _, metrics, _ in theirs]
    assert all(waits in ([], ["cpu"]) for *_, waits in ours)
    assert counted.once
    assert not counted.other
    assert any(sum(map(bool, metrics.k_counts[1:])) > 2 for _, metrics, _ in ours)


MIXED: list[dict[str, Any]] = [
    {}, {"top_p": 0.9}, {"logprobs": 2}, {"presence_penalty": 0.5}, {"logit_bias": {7: 2.0}},
    {"min_tokens": 5, "stop_token_ids": STOPS}, {"prompt_logprobs": 1}, {"max_tokens": 1},
]  # fmt: skip


def test_requests_that_need_the_host_take_the_ordinary_path(make: MakeEngine) -> None:
    """Law: the whole step takes the ordinary path then, with the same texts and counts."""
    requests = [params(i, **{"max_tokens": 4 + 3 * i, **fields}) for i, fields in enumerate(MIXED)]
    ours, theirs = make(3), make(3, usual=False)
    counted = Counted(ours)
    assert steps_of(ours, requests) == steps_of(theirs, requests)
    assert counted.other > 0


def test_beside_prompts_in_a_small_pool(make: MakeEngine) -> None:
    """Law: this holds when prompts are chunked beside drafting sequences, and when sequences are
    preempted and start over."""
    more = {
        "schedule": {"max_step_tokens": 12, "max_sequences": 4},
        "cache": {"block_size": BLOCK, "num_blocks": 14},
    }
    requests = [params(i, max_tokens=14, ignore_eos=True) for i in range(5)]
    ours, theirs = make(2, **more), make(2, usual=False, **more)
    counted = Counted(ours)
    steps = steps_of(ours, requests)
    assert steps == steps_of(theirs, requests)
    assert counted.once > 0
    assert sum(step[1].preemptions for step in steps) > 0


def test_the_controller_chooses_as_ever(make: MakeEngine) -> None:
    """Law: whatever K it chooses, the text is that of plain decoding, and it keeps learning."""
    requests = [params(i, max_tokens=24, ignore_eos=True) for i in range(2)]
    controller = {"kind": "adaptive", "k_max": 4}
    proposer = {"path": make().ready.target}
    engine = make(twin=True, speculation={"proposer": proposer, "controller": controller})
    counted = Counted(engine)
    texts = [texts_of(steps_of(each, requests)) for each in (engine, make(0))]
    assert texts[0] == texts[1]
    assert counted.once > 0


class NowAndThen(FixedK):
    """Asks for second-best tokens in two of three steps."""

    steps = 0

    def choose(self, load: Load) -> Choice:
        self.steps += 1
        return msgspec.structs.replace(self.choice, branches=self.steps % 3 > 0)


@pytest.mark.parametrize("name", [None, "filters", "everything"])
def test_second_best_tokens_are_placed_once_the_host_has_seen_the_proposal(
    make: MakeEngine, pair: Pair, name: str | None
) -> None:
    """Law: steps in which the controller asks for second-best tokens take the ordinary path and
    verify some; all others wait once. Texts are those of plain decoding."""
    assert pair.draft is not None
    more = {"max_tokens": 30, **(FIELDS[name] if name else {}), "ignore_eos": True}
    requests = [params(i, **more) for i in range(4)]
    proposer = {"path": pair.draft.path, "branches": 2}
    speculation = {"proposer": proposer, "companions": []}
    engine = make(speculation=speculation)
    obey(engine, NowAndThen(3))
    counted, rounds, paths = Counted(engine), engine._rounds, list[list[int]]()

    def watched(plan: StepPlan, seconds: StepSeconds, stopwatch: Stopwatch) -> Any:
        before = counted.once
        sampled = rounds(plan, seconds, stopwatch)
        trees = [own for own in sampled if own.proposal.branches is not None]
        paths.extend(own.path for own in trees)
        if any(own.proposal.tokens for own in sampled):
            asks = engine._allowance.choice.branches
            assert asks == (counted.once == before)
            assert asks or not trees
        return sampled

    engine._rounds = watched  # type: ignore[assignment]
    texts = [texts_of(steps_of(each, requests)) for each in (engine, make(0))]
    assert texts[0] == texts[1]
    assert counted.once
    assert any(path and path[-1] >= len(path) for path in paths)  # some were right


@pytest.mark.parametrize("name", [None, *FIELDS])
@pytest.mark.parametrize("k", [0, 1, 4])
def test_the_host_waits_once(make: MakeEngine, k: int, name: str | None) -> None:
    """Law: one wait covers catch-up, proposal, verification and draws, whatever the fields, also at
    K = 0."""
    engine = make(k)
    for i in range(3):
        fields = {"max_tokens": 90, "ignore_eos": True, **(FIELDS[name] if name else {})}
        engine.add(Submit(str(i), PROMPT[i:], params(i, **{**fields, "stop_token_ids": ()}), 0.0))
    for _ in range(12):  # until every bucket is allocated
        engine.step()
    for _ in range(4):
        with Waits() as waits:
            outputs = engine.step()
        assert outputs.metrics.num_proposed == 3 * k
        # A bucket that is allocated late needs host arrays of its own.
        assert [name for name in waits.seen if name != "numpy"] == ["cpu"]


@pytest.mark.parametrize("fields", [{}, {"frequency_penalty": -0.2, "logprobs": 1}], ids=str)
def test_look_ups_share_the_forward(make: MakeEngine, fields: dict[str, Any]) -> None:
    """Law: draft tokens by look-up are verified in the same forward as those of the draft, and no
    output shows which path the step took."""
    prompts = [PROMPT[:6], PROMPT[2:7], [5, 6, 7, 8, 9] * 4]
    requests = [
        params(i, temperature=0.0, max_tokens=60, ignore_eos=True, **fields) for i in range(3)
    ]

    def steps(engine: Engine) -> tuple[list[list[Output]], Counted | None]:
        counted = Counted(engine) if engine._rounds._draft else None
        for i, (prompt, fields) in enumerate(zip(prompts, requests, strict=True)):
            engine.add(Submit(str(i), prompt, fields, 0.0))
        found = []
        while engine.has_work:
            found.append(untimed(engine.step().items))
        return found, counted

    outputs, counted = steps(make(4, companions=["ngram"]))
    assert outputs == steps(make(4, usual=False, companions=["ngram"]))[0]
    assert counted is not None
    assert counted.looked_up > 0


@pytest.mark.parametrize("usual", [True, False])
def test_outcomes_are_reported_once_a_step(make: MakeEngine, usual: bool) -> None:
    """Law: on either path, learning proposers get, for each sequence that sampled in the step, the
    target's token at the root and after each accepted node, up to the end of the text."""
    engine, listener = make(3, usual=usual, twin=True), Listener()
    engine._proposer._learners.append(listener)
    engine._proposer.learns = True
    requests = [params(i, ignore_eos=True) for i in range(3)]
    steps = steps_of(engine, requests)
    assert len(listener.outcomes) == len(steps)
    texts: dict[str, list[int]] = {}
    for own in (own for heard in listener.outcomes for own in heard):
        texts.setdefault(own.seq.id, []).extend(own.tokens)
        assert len(own.drawn) == 1 + len(own.proposal)
        tokens = [own.drawn[1 + node] for node in (-1, *own.path)]
        assert tokens[: len(own.tokens)] == own.tokens
    outputs = [item for items, _ in steps for item in items]
    assert texts == {
        str(i): [t for o in outputs if o.id == str(i) for t in o.tokens] for i in range(3)
    }
    assert any(own.path for heard in listener.outcomes for own in heard)
