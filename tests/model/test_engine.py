"""The engine as a plain object: what it refuses, ends, counts and survives."""

from __future__ import annotations

import time
from typing import ClassVar

import pytest
import torch

from engine.config import AdaptiveConfig, EngineConfig, ScheduleConfig
from engine.control.controller import Choice, FixedK, Load
from engine.core import Engine
from engine.errors import ConfigError
from engine.messages import Mode, Output, SamplingParams, StepMetrics, Submit
from engine.model.pair import Pair, load_pair
from engine.model.runner import ModelOutput
from engine.scheduling.segment import Segment
from engine.scheduling.step_record import StepRecord


@pytest.fixture(scope="module")
def config(tiny_target: str, tiny_draft: str) -> EngineConfig:
    return EngineConfig.model_validate(
        {
            "target": {"path": tiny_target},
            "device": "cpu",
            "speculation": {
                "proposer": {"kind": "draft_model", "path": tiny_draft},
                "controller": {"kind": "fixed", "k": 3},
            },
            "cache": {"num_blocks": 64},
        }
    )


@pytest.fixture(scope="module")
def pair(config: EngineConfig) -> Pair:
    return load_pair(config)


def drain(engine: Engine) -> tuple[list[Output], list[StepMetrics]]:
    items: list[Output] = []
    metrics: list[StepMetrics] = []
    while engine.has_work:
        result = engine.step()
        items += result.items
        metrics.append(result.metrics)
    return items, metrics


def params(**fields: object) -> SamplingParams:
    given: dict[str, object] = {"seed": 1, "max_tokens": 8, "ignore_eos": True, **fields}
    return SamplingParams(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompt", "fields", "says"),
    [
        ([], {}, "no tokens"),
        ([1, 128], {}, "token id 128 is outside the vocabulary (0..127)"),
        ([-1], {}, "token id -1"),
        ([1] * 256, {}, "256 tokens"),
        ([1], {"logit_bias": {500: 1.0}}, "logit_bias names token id 500"),
        ([1], {"stop_token_ids": (128,)}, "stop_token_ids names token id 128"),
        ([1], {"temperature": float("nan")}, "temperature is nan"),
        ([1], {"top_p": 0.0}, "top_p is 0"),
        ([1], {"max_tokens": -1}, "max_tokens is -1"),
        ([1], {"top_k": 2**63}, "top_k is 9223372036854775808"),
        ([1], {"max_tokens": 2**63}, "max_tokens is 9223372036854775808"),
        ([1], {"logprobs": 21}, "logprobs is 21"),
        ([1], {"logit_bias": {5: float("nan")}}, "logit_bias[5] is nan"),
    ],
)
def test_a_bad_request_ends_with_a_sentence(
    prompt: list[int], fields: dict[str, object], says: str, config: EngineConfig, pair: Pair
) -> None:
    """Law: the engine validates every request; a bad one ends itself, never the step. Bug: a top_k
    of more than 63 bits ended the engine."""
    engine = Engine(config, pair=pair)
    engine.add(Submit("good", [1, 2, 3], params(), 0.0))
    engine.add(Submit("bad", prompt, params(**fields), 0.0))
    items, _ = drain(engine)
    ends = {o.id: o for o in items if o.finish}
    assert ends["good"].finish == "length"
    assert ends["bad"].finish == "error"
    assert says in (ends["bad"].error or "")


def test_given_step_costs_are_not_measured_again(config: EngineConfig, pair: Pair) -> None:
    """Law: an engine that is given measured step costs uses them unchanged, and its replies are the
    same; costs it does not understand, such as another version's, are measured again."""
    speculation = config.speculation.model_copy(update={"controller": AdaptiveConfig(k_max=3)})
    adaptive = config.model_copy(update={"speculation": speculation})
    measured, replies = b"", []
    for given in (b"", b"first", b"\x80", b"\xff"):
        engine = Engine(adaptive, pair=pair, measured=measured if given == b"first" else given)
        assert (engine.ready.measured == measured) == (given == b"first")
        measured = measured or engine.ready.measured
        engine.add(Submit("a", [1, 2, 3], params(max_tokens=20), 0.0))
        replies.append([token for output in drain(engine)[0] for token in output.tokens])
    assert replies == replies[:1] * 4
    assert len(measured) > 100


def test_a_duplicate_id_is_refused_and_the_first_goes_on(config: EngineConfig, pair: Pair) -> None:
    """Bug elsewhere: a second request with the same id crashed the engine."""
    engine = Engine(config, pair=pair)
    engine.add(Submit("x", [1, 2, 3], params(), 0.0))
    engine.step()
    engine.add(Submit("x", [4], params(), 0.0))
    items, _ = drain(engine)
    assert [o.finish for o in items if o.finish] == ["error", "length"]


def test_abort_is_acknowledged_once_and_frees_blocks(config: EngineConfig, pair: Pair) -> None:
    """Law: an aborted sequence ends with `abort`, and its blocks are freed; unknown ids are
    ignored, since an abort may cross a finish on the wire."""
    engine = Engine(config, pair=pair)
    engine.add(Submit("a", [1, 2, 3], params(max_tokens=50), 0.0))
    engine.add(Submit("b", [1, 2, 3], params(), 0.0))
    engine.step()
    engine.abort(["a", "never seen"])
    engine.abort(["a"])
    items, _ = drain(engine)
    assert [o.finish for o in items if o.id == "a" and o.finish] == ["abort"]
    assert engine.gauges().blocks_used == 0


def test_a_step_without_work_is_not_observed(config: EngineConfig, pair: Pair) -> None:
    """Bug: a step that only acknowledged aborts asked the controller about an empty batch, which it
    took for batch size 1: it half forgot its estimates for four, and explored again."""

    class Watched(FixedK):
        loads: ClassVar[list[int]] = []

        def choose(self, load: Load) -> Choice:
            self.loads.append(load.num_sequences)
            return super().choose(load)

    engine = Engine(config, pair=pair)
    controller = Watched(3)
    engine._controller.configured = engine._controller._present = controller
    for name in "ab":
        engine.add(Submit(name, [1, 2, 3], params(max_tokens=50), 0.0))
    engine.step()
    engine.abort(["a", "b"])
    items, _ = drain(engine)
    assert [o.finish for o in items if o.finish] == ["abort", "abort"]
    engine.add(Submit("refused", [], params(), 0.0))
    engine.step()
    assert controller.loads == [2]


def test_the_context_ends_a_sequence(config: EngineConfig, pair: Pair) -> None:
    """Law: every sequence ends; at the model's length it ends with `length`."""
    engine = Engine(config, pair=pair)
    engine.add(Submit("long", [1] * 250, params(max_tokens=1000), 0.0))
    items, _ = drain(engine)
    assert sum(len(o.tokens) for o in items) == 6
    assert items[-1].finish == "length"


def test_step_metrics_add_up(config: EngineConfig, pair: Pair) -> None:
    """Law: sums over steps equal sums over outputs, by depth and in total, and prefix hits are
    counted in the step where they occur."""
    engine = Engine(config, pair=pair)
    prompt = [7] * 40
    totals: dict[str, int] = dict.fromkeys(
        ("num_generated_tokens", "num_proposed", "num_accepted", "cached_tokens"), 0
    )
    outputs: list[Output] = []
    for name in ("cold", "warm"):
        engine.add(Submit(name, prompt, params(max_tokens=20), 0.0))
        items, steps = drain(engine)
        outputs += items
        for metrics in steps:
            assert sum(metrics.proposed_at) == metrics.num_proposed
            assert sum(metrics.accepted_at) == metrics.num_accepted
            assert all(
                kept <= made
                for kept, made in zip(metrics.accepted_at, metrics.proposed_at, strict=True)
            )
            for key in totals:
                totals[key] += getattr(metrics, key)
    ends = [o for o in outputs if o.finish]
    assert totals["num_generated_tokens"] == sum(len(o.tokens) for o in outputs) == 40
    assert totals["num_proposed"] == sum(o.proposed for o in ends)
    assert totals["num_accepted"] == sum(o.accepted for o in ends)
    assert totals["cached_tokens"] == 32 == sum(o.cached_tokens or 0 for o in outputs)


def test_an_output_tells_how_long_its_sequence_was_queued(config: EngineConfig, pair: Pair) -> None:
    """Law: the queue time runs from arrival to the first step with the sequence, and is in its
    first Output only; if the clock goes backwards it is 0, never negative."""
    one = config.model_copy(update={"schedule": ScheduleConfig(max_sequences=1)})
    engine, now = Engine(one, pair=pair), time.time()
    for name, arrival in (("runs", now - 5), ("waits", now - 5), ("late", now + 900)):
        engine.add(Submit(name, [1, 2, 3], params(), arrival))
    items, _ = drain(engine)
    queued = [(o.id, o.queued) for o in items if o.queued is not None]
    assert [name for name, _ in queued] == ["runs", "waits", "late"]
    (_, runs), (_, waits), (_, late) = queued
    assert 5 <= runs < waits < 900
    assert late == 0


def test_logits_that_are_no_numbers_end_one_request(config: EngineConfig, pair: Pair) -> None:
    """Bug elsewhere: a row of NaN became a valid-looking token. Here it ends its own request with
    an error, and the neighbour's text is untouched."""
    engine = Engine(config, pair=pair)
    clean = Engine(config, pair=pair)
    clean.add(Submit("ok", [9, 8, 7], params(), 0.0))
    want = [t for o in drain(clean)[0] for t in o.tokens]

    class Poisoned:
        """The engine's own runner, except that the last request's rows are NaN."""

        def __init__(self) -> None:
            self.inner = engine._runner
            self.seconds = 0.0
            self.every_state = False

        def forward(self, segments: list[object], **_: object) -> ModelOutput:
            logits = self.inner.forward(segments).logits.clone()  # type: ignore[arg-type]
            if len(segments) > 1:
                logits[-1] = torch.nan
                logits[-4:] = torch.nan
            return ModelOutput(logits)

    engine._rounds._runner = Poisoned()  # type: ignore[assignment]
    engine.add(Submit("ok", [9, 8, 7], params(), 0.0))
    engine.add(Submit("nan", [1, 2, 3], params(), 0.0))
    items, _ = drain(engine)
    ends = {o.id: o for o in items if o.finish}
    assert ends["nan"].finish == "error"
    assert "finite" in (ends["nan"].error or "")
    assert [t for o in items if o.id == "ok" for t in o.tokens] == want
    assert engine.gauges().blocks_used == 0


def test_observed_rows_are_the_computed_ones(config: EngineConfig, pair: Pair) -> None:
    """Bug: when sequences start over after a preemption, rows of tokens they had generated were not
    counted: a step of 16 such sequences in which none sampled was observed as having no rows."""

    class Observed(FixedK):
        """Records the number of rows of each step."""

        rows: ClassVar[list[int]] = []

        def update(self, record: StepRecord) -> None:
            self.rows.append(record.rows)

    class Counted:
        """The engine's own runner, counting rows."""

        rows = 0
        every_state = False

        def __init__(self) -> None:
            self.inner = engine._runner

        def forward(self, segments: list[Segment], **_: object) -> ModelOutput:
            self.rows = sum(len(segment.tokens) for segment in segments)
            return self.inner.forward(segments)

        @property
        def seconds(self) -> float:
            return self.inner.seconds

    small = {"cache": {"block_size": 4, "num_blocks": 64}, "schedule": {"max_step_tokens": 16}}
    engine = Engine(EngineConfig.model_validate({**config.model_dump(), **small}), pair=pair)
    engine._controller.configured = engine._controller._present = Observed(1)
    runner = engine._rounds._runner = Counted()  # type: ignore[assignment]
    for name in "abcd":
        engine.add(Submit(name, [1, 2, 3], params(max_tokens=100), 0.0))
    preempted = queried = 0
    while engine.has_work:
        metrics = engine.step().metrics
        preempted, queried = preempted + metrics.preemptions, queried + metrics.queried_tokens
        assert Observed.rows[-1] == runner.rows
    assert preempted > 0
    assert queried == 4 * 3, "a sequence that is admitted again is looked up again, not counted"
    assert len(Observed.rows) > 20


def test_modes_switched_while_it_runs_change_no_text(config: EngineConfig, pair: Pair) -> None:
    """Law: a position's token does not depend on K, whoever chooses it and whenever."""

    def texts(switches: dict[int, tuple[Mode, int]]) -> tuple[dict[str, list[int]], list[int]]:
        engine = Engine(config, pair=pair)
        for i in range(3):
            engine.add(Submit(str(i), [5 + i, 7, 9], params(seed=i, max_tokens=40), 0.0))
        found: dict[str, list[int]] = {}
        ks: list[int] = []
        while engine.has_work:
            if len(ks) in switches:
                engine.set_speculation(*switches[len(ks)])
            result = engine.step()
            ks.append(result.metrics.estimates.k)
            for item in result.items:
                found.setdefault(item.id, []).extend(item.tokens)
        return found, ks

    off, plain = texts({0: ("off", 0)})
    mixed, ks = texts({0: ("fixed", 1), 3: ("off", 0), 8: ("fixed", 2), 12: ("auto", 0)})
    assert mixed == off
    assert set(plain) == {0}
    assert ks[:13] == [1] * 3 + [0] * 5 + [2] * 4 + [3]


def test_a_mode_beyond_the_configuration_is_refused(config: EngineConfig, pair: Pair) -> None:
    """Law: the configured K also bounds the modes that an operator sets."""
    with pytest.raises(ConfigError, match="from 1 to 3"):
        Engine(config, pair=pair).set_speculation("fixed", 4)
