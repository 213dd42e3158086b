"""Mixtures of experts: their step costs in the profile at start, and the K that follows.

The clock counts the experts that a forward reads, so results do not depend on the machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from statistics import mean, median, median_low

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from engine.config import EngineConfig, Role
from engine.control.adaptive import AdaptiveK
from engine.control.cost_model import CostModel
from engine.control.profile import Points, Profile
from engine.lab.plan.shape import Experts
from engine.model.kv_cache import KVCache
from engine.model.loaded import ModuleCall
from engine.model.loader import load_model
from engine.model.runner import ModelRunner
from engine.step.profiling import ForwardTimer, profile_at_start
from tests.support import tiny
from tests.support.controller_world import World, play

COUNT, K_MAX, CROWD = 24, 8, 4
MIXTURES = {"mixtral": tiny.mixtral, "qwen3_moe": tiny.qwen3_moe}
Runners = tuple[ModelRunner, ModelRunner, KVCache]  # target, dense draft, their KV cache


class Reads:
    """A clock that advances by what a forward reads: 1 ms for each expert per layer and 1 ms for
    the rest; in a dense model, as much as a mixture takes for a single token."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.now = 0.0
        self._experts = [m for name, m in model.named_modules() if name.endswith(".experts")]
        for part in self._experts:
            part.register_forward_pre_hook(self._routed)
        model.register_forward_pre_hook(self._begun)

    def __call__(self) -> float:
        return self.now

    def _begun(self, *_: object) -> None:
        self.now += 1e-3 if self._experts else 3e-3

    def _routed(self, _: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        read = set(given[1].flatten().tolist())
        self.now += 1e-3 * len(read) / len(self._experts)


def _runner(model: PreTrainedModel, role: Role, folder: Path, cache: KVCache) -> ModelRunner:
    """Return a runner that takes its time from `Reads`."""
    loaded = load_model(tiny.save(model, folder / role), role=role, device="cpu")
    loaded = replace(loaded, compiled=None, logits=ModuleCall(loaded.model))
    return ModelRunner(loaded, cache, role, clock=Reads(loaded.model))


@pytest.fixture(params=sorted(MIXTURES))
def mixture(request: pytest.FixtureRequest, tmp_path: Path) -> Runners:
    cache = KVCache(256, 16, "cpu")
    model = MIXTURES[request.param](experts=COUNT)
    target = _runner(model, "target", tmp_path, cache)
    return target, _runner(tiny.llama(), "draft", tmp_path, cache), cache


def _profile(target: ModelRunner, draft: ModelRunner | None, cache: KVCache) -> Profile:
    settings = {"target": {"path": "x"}, "schedule": {"max_sequences": CROWD}}
    return profile_at_start(EngineConfig.model_validate(settings), target, draft, cache, 200)


def test_rows_of_other_tokens_read_other_experts(mixture: Runners) -> None:
    """Law: the profiled cost rises with the experts read, steeply at first. Bug: with rows of one
    repeated token, the profile read the experts of a single row."""
    target, _, cache = mixture
    sizes, timer = [(1, n) for n in (1, 2, 5, 17)], ForwardTimer(target, cache)
    one, two, five, most = (seconds for _, seconds in timer.points(sizes))
    assert two > 1.15 * one
    assert most > 3 * one
    assert (five - one) / 4 > (most - five) / 12
    timer._tokens = repeat(7)  # type: ignore[assignment]
    alike = timer.points(sizes)[-1][1]
    assert alike < 0.75 * most


def test_predictions_match_measurements(mixture: Runners) -> None:
    """Law: for 1 to 4 sequences with up to 8 draft tokens, most of them not profiled, half of the
    predictions are within 10 % and nine of ten within 25 %."""
    target, draft, cache = mixture
    costs, errors = CostModel(), list[float]()
    costs.set_profile(_profile(target, draft, cache))
    timer = ForwardTimer(target, cache)
    for batch in range(1, CROWD + 1):
        expected = costs.by_rows(batch, batch * (K_MAX + 1))
        for each in range(1, K_MAX + 2):
            took = [timer._time(timer._batch((batch, each, 64))) for _ in range(4)]
            errors.append(abs(float(expected[batch * each]) / median_low(took) - 1))
    assert median(errors) < 0.1
    assert np.quantile(errors, 0.9) < 0.25


@dataclass
class Told(World):
    """A world whose costs come from a profile."""

    points: Points = ()

    def target(self, rows: int) -> float:
        return float(np.interp(rows, *np.array(self.points).T))


@pytest.mark.parametrize("family", sorted(MIXTURES))
def test_k_falls_against_a_dense_target(family: str, tmp_path: Path) -> None:
    """Law: with the same draft and acceptance, K is smaller where the profile shows that reading
    experts dominates the time."""
    chosen = []
    for name, model in (("mixture", MIXTURES[family](experts=COUNT)), ("dense", tiny.llama())):
        cache = KVCache(256, 16, "cpu")
        runner = _runner(model, "target", tmp_path / name, cache)
        measured = replace(_profile(runner, None, cache), draft=[(1, 4e-4), (CROWD, 4e-4)])
        controller = AdaptiveK(K_MAX, stops=False)
        controller.costs.set_profile(measured)
        world = Told(0.7, draft=4e-4, host=0.0, points=measured.target)
        for rows, seconds in measured.target if name == "mixture" else ():
            assert seconds == pytest.approx(1e-3 * (1 + Experts(COUNT, 2, 1).touched(rows)), 0.2)
        chosen.append(mean(play(controller, world, 400).ks[200:]))
    assert chosen[0] + 1 < chosen[1]
