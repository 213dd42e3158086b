"""Hidden states that a forward returns are transformers' own, on every path, and cost nothing if
not requested."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine.attention.flashinfer import FlashInferBackend
from engine.cpu.fused import FusedDecoder
from engine.model.hidden import HiddenCall
from engine.model.kv_cache import KVCache
from engine.model.loaded import LoadedModel, ModuleCall
from engine.model.loader import load_model
from engine.model.runner import Graphs, ModelRunner
from engine.scheduling.segment import LAST, HiddenRows, Segment
from tests.support import tiny
from tests.support.fake_flashinfer import PagedPrefill
from tests.support.fake_recorder import FakeRecorder

TOKENS = [5, 17, 9, 5, 17, 9, 40, 41, 42, 5, 17]
LAYERS = (LAST, 0, 1)
BLOCK, BLOCKS = 4, 40
TREE = [30, 31, 32, 33]
PARENTS = [-1, -1, 0, 1]
Make = Callable[[LoadedModel, HiddenRows | None], ModelRunner]


def with_module_call(model: LoadedModel) -> LoadedModel:
    return replace(model, logits=ModuleCall(model.model), compiled=None)


def eager(model: LoadedModel, hidden: HiddenRows | None) -> ModelRunner:
    cache = KVCache(BLOCKS, BLOCK, "cpu")
    return ModelRunner(with_module_call(model), cache, "eager", attention="sdpa", hidden=hidden)


def fused(model: LoadedModel, hidden: HiddenRows | None) -> ModelRunner:
    assert isinstance(model.logits, FusedDecoder)
    cache = KVCache(BLOCKS, BLOCK, "cpu")
    return ModelRunner(replace(model, compiled=None), cache, "fused", hidden=hidden)


def compiled(model: LoadedModel, hidden: HiddenRows | None) -> ModelRunner:
    assert model.compiled is not None
    return ModelRunner(model, KVCache(BLOCKS, BLOCK, "cpu"), "compiled", hidden=hidden)


def graphs(model: LoadedModel, hidden: HiddenRows | None) -> ModelRunner:
    cache = KVCache(BLOCKS, BLOCK, "cpu", padding_block=True)
    return ModelRunner(
        with_module_call(model),
        cache,
        "graphs",
        backend=FlashInferBackend(torch.device("cpu"), PagedPrefill),
        graphs=Graphs(FakeRecorder(), 24),
        hidden=hidden,
    )


PATHS: dict[str, Make] = {"eager": eager, "fused": fused, "compiled": compiled, "graphs": graphs}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Save a Llama that compiled code runs."""
    made = tiny.llama({**tiny.GROUPED, "head_dim": 16})
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    return tiny.save(made, tmp_path_factory.mktemp("hidden"))


@pytest.fixture(scope="module")
def model(folder: str) -> LoadedModel:
    return load_model(folder, role="draft", device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def states(folder: str) -> Callable[[list[int]], Tensor]:
    """Return a function from a text to states `[rows, layers * width]` by transformers."""
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    @torch.inference_mode()
    def of(tokens: list[int]) -> Tensor:
        found = whole(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        return torch.cat([found[3][0], found[1][0], found[2][0]], dim=1)

    return of


STEPS = [  # a prompt in two parts beside another, one token, a tree beside one token
    [Segment(TOKENS[:6], 0, [3, 1, 2, 9], 0), Segment(TOKENS[:3], 0, [4, 5], 2)],
    [Segment(TOKENS[6:], 6, [3, 1, 2, 9], 1)],
    [Segment([50], 11, [3, 1, 2, 9], 1)],
    [Segment([51, *TREE], 12, [3, 1, 2, 9, 8], 5, PARENTS), Segment([7], 3, [4, 5], 1)],
]


def texts() -> list[list[list[int]]]:
    """Return the tokens up to each row of each step."""
    text = [*TOKENS, 50, 51]
    tree = [[30], [31], [30, 32], [31, 33]]
    return [
        [*(text[: i + 1] for i in range(6)), *(TOKENS[: i + 1] for i in range(3))],
        [text[: i + 1] for i in range(6, 11)],
        [text[:12]],
        [text, *([*text, *path] for path in tree), [*TOKENS[:3], 7]],
    ]


@pytest.mark.parametrize("every", [True, False])
@pytest.mark.parametrize("path", PATHS)
def test_they_are_those_of_transformers(
    path: str, every: bool, model: LoadedModel, states: Callable[[list[int]], Tensor]
) -> None:
    """Law: states match for every row, with the layers in the requested order; requesting them
    changes no bit of the logits."""
    asking, plain = (PATHS[path](model, own) for own in (HiddenRows(LAYERS, every), None))
    for _ in range(2):  # first recorded, then replayed
        for segments, behind in zip(STEPS, texts(), strict=True):
            output, other = asking.forward(segments), plain.forward(segments)
            assert torch.equal(output.logits, other.logits)
            assert other.hidden is None
            rows = list(range(len(behind)))
            if not every:
                ends = torch.tensor([len(s.tokens) for s in segments]).cumsum(0).tolist()
                rows = [
                    row
                    for end, segment in zip(ends, segments, strict=True)
                    for row in range(end - segment.num_logits, end)
                ]
            wanted = torch.stack([states(behind[row])[-1] for row in rows])
            assert output.hidden is not None
            torch.testing.assert_close(output.hidden, wanted, atol=1e-4, rtol=1e-4)
            unasked = asking.forward(segments, states=False)
            assert unasked.hidden is None
            assert torch.equal(unasked.logits, other.logits)


@pytest.mark.parametrize("path", PATHS)
def test_no_request_costs_nothing(
    path: str, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: no hook is set, not even during a call, nothing is allocated or written."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(torch.nn.Module, "register_forward_hook", refuse)
    monkeypatch.setattr("engine.model.runner.HiddenCall", refuse)
    monkeypatch.setattr("engine.cpu.decoder.CompiledDecoder.states", refuse)
    runner = PATHS[path](model, None)
    for segments in STEPS:
        assert runner.forward(segments).hidden is None


def test_no_hook_stays_behind(model: LoadedModel) -> None:
    """Law: a model that is shared with an engine that requests no states is left unchanged."""
    runner = eager(model, HiddenRows((LAST,)))
    runner.forward(STEPS[0])
    assert not any(module._forward_hooks for module in model.model.modules())


def test_more_rows_than_a_graph_holds(
    model: LoadedModel, states: Callable[[list[int]], Tensor]
) -> None:
    """Law: a long prompt's states come from a forward without a graph, and do not overwrite those
    of graphs."""
    runner, text = graphs(model, HiddenRows(LAYERS, every=True)), (TOKENS * 4)[:40]
    wanted = states(text)
    blocks = list(range(10, 20))
    for first, last in ((0, 10), (10, 38), (38, 40)):  # the middle one exceeds the largest bucket
        output = runner.forward([Segment(text[first:last], first, blocks, 1)])
        assert output.hidden is not None
        torch.testing.assert_close(output.hidden, wanted[first:last], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("path", [eager, fused, compiled])
def test_a_forward_without_them_calls_nothing(
    path: Make, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: where no compiled decoder runs the target, each step at K = 0 copied hidden states that
    nothing read. It took a twentieth of the built-in target's steps with Medusa in float32."""
    asking = path(model, HiddenRows(LAYERS))
    monkeypatch.setattr(HiddenCall, "__call__", lambda *_: pytest.fail("states were copied"))
    assert asking.forward(STEPS[0], states=False).hidden is None
