"""Captured forwards and proposals, with a recorder that re-runs the function on replay: buckets,
padding, fixed tensors and eviction; results equal those of eager forwards."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.attention.flashinfer import FlashInferBackend
from engine.config import MAX_K, EngineConfig
from engine.core import Engine
from engine.messages import SamplingParams, StepSeconds, Submit
from engine.model.chain_graphs import DraftedChains, read_chains
from engine.model.graphs import GraphPool
from engine.model.kv_cache import KVCache
from engine.model.loaded import LoadedModel, ModuleCall
from engine.model.loader import load_model
from engine.model.pair import Pair, _graphs_of, use_device
from engine.model.proof import waits_for_device
from engine.model.runner import DeviceTimer, Graphs, ModelOutput, ModelRunner
from engine.sampling.device_draws import DeviceDraws
from engine.sampling.logits import LogitsProcessor, RowContext
from engine.sampling.plain import Rows
from engine.scheduling.segment import Segment, Start
from engine.scheduling.sequence import Sequence
from engine.speculation.draft_model import DraftModelProposer
from engine.step.rounds import move_late_seconds
from tests.support.fake_flashinfer import PagedPrefill
from tests.support.fake_recorder import FakeRecorder
from tests.support.reference import Reference
from tests.support.waits import Waits

CPU = torch.device("cpu")
BLOCK, BLOCKS = 4, 40
PROMPT = [5, 17, 9, 5, 17, 9, 40, 41, 42, 5, 17]


@pytest.fixture(scope="module")
def target(tiny_target: str) -> LoadedModel:
    return load_model(tiny_target, role="target", device="cpu")


@pytest.fixture(scope="module")
def draft(tiny_draft: str) -> LoadedModel:
    return load_model(tiny_draft, role="draft", device="cpu")


def eager(model: LoadedModel) -> ModelRunner:
    return ModelRunner(model, KVCache(BLOCKS, BLOCK, "cpu"), "eager", attention="sdpa")


def captured(model: LoadedModel, recorder: FakeRecorder, most_steps: int = 0) -> ModelRunner:
    """Return a runner as on CUDA: the model's own forward, without compiled code."""
    runner = ModelRunner(
        replace(model, logits=ModuleCall(model.model)),
        KVCache(BLOCKS, BLOCK, "cpu", padding_block=True),
        model.role,
        backend=FlashInferBackend(CPU, PagedPrefill),
        graphs=Graphs(recorder, 24, most_steps),
    )
    runner._compiled = None
    return runner


STEPS = [  # prompts, decodes, a verification beside a prompt, more rows than the largest bucket
    [Segment(PROMPT, 0, [3, 1, 2], 1)],
    [Segment([7], 11, [3, 1, 2], 1), Segment(PROMPT[:6], 0, [9, 8], 1)],
    [Segment([7, 8, 9], 12, [3, 1, 2, 4], 3), Segment([1], 6, [9, 8], 1)],
    [Segment([4], 15, [3, 1, 2, 4], 1), Segment(PROMPT * 3, 0, list(range(20, 30)), 2)],
    [Segment([6, 5], 16, [3, 1, 2, 4, 5], 1), Segment([6], 7, [9, 8], 0)],
]


def test_replays_equal_eager_forwards(target: LoadedModel) -> None:
    """Law: for any number of rows and any padding, a replay gives the logits of the eager forward,
    and leaves the KV that the next forward reads."""
    recorder = FakeRecorder()
    ours, theirs = captured(target, recorder), eager(target)
    for segments in STEPS:
        found, expected = ours.forward(segments).logits, theirs.forward(segments).logits
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert recorder.recorded == 3  # buckets of 16, 8 and 4 rows; 34 rows are too many
    assert recorder.replayed == 4


def test_a_tree_is_run_eagerly(target: LoadedModel) -> None:
    """Law: a batch that no graph can stage runs eagerly."""
    recorder = FakeRecorder()
    ours, theirs = captured(target, recorder), eager(target)
    for runner in (ours, theirs):
        runner.forward([Segment(PROMPT, 0, [3, 1, 2], 1)])
    before = recorder.replayed
    tree = [Segment([7, 8, 9, 10], 11, [3, 1, 2, 4], 4, tail_parents=[-1, -1, 1])]
    torch.testing.assert_close(ours.forward(tree).logits, theirs.forward(tree).logits)
    assert recorder.replayed == before


def test_a_long_stretch_is_caught_up_in_several_replays(draft: LoadedModel) -> None:
    """Bug: all forwards of a model leave logits in the same buffer, so each replay overwrote those
    of the one before, although they are joined at the end."""
    processor, found = LogitsProcessor(draft.eos_ids), list[Tensor]()
    for runner in (captured(draft, FakeRecorder()), eager(draft)):
        proposer = DraftModelProposer(
            runner,
            processor=processor,
            draws=DeviceDraws(processor, draft.vocab_size, CPU),
            vocab_size=draft.vocab_size,
            max_step_tokens=4,
        )
        found.append(proposer._run([Segment(PROMPT, 0, [3, 1, 2], 10)]).logits)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_all_buckets_are_recorded_at_start(target: LoadedModel) -> None:
    """Law: each is recorded once, the largest first; later forwards record nothing."""
    recorder = FakeRecorder()
    ours = captured(target, recorder)
    [*ours.capture()]
    assert recorder.recorded == 6  # 1, 2, 4, 8, 16, 24
    ours.forward(STEPS[0])
    assert recorder.recorded == 6


def test_the_pool_drops_what_was_used_longest_ago() -> None:
    recorder = FakeRecorder()

    class Doubled:
        def __init__(self, name: str) -> None:
            self.number = torch.tensor([float(ord(name))])

        def run(self) -> Tensor:
            return self.number * 2

    pool = GraphPool[str, Doubled](recorder, Doubled, most=2)
    for name in "abac":
        assert pool.replay(name).item() == 2 * ord(name)
    assert set(pool._held) == {"a", "c"}
    assert recorder.recorded == 3
    pool.inputs("a").number.fill_(21.0)
    assert pool.replay("a").item() == 42.0
    assert recorder.recorded == 3


ASKS: list[list[dict[str, Any]]] = [
    [{"temperature": 1.0}, {"temperature": 0.0}, {"temperature": 2.0}],
    [{}, {"top_p": 0.7}, {"top_k": 5, "min_p": 0.1, "temperature": 0.6}],
    [{"presence_penalty": 2.0}, {"top_p": 0.9}, {}],
    [
        {"repetition_penalty": 2.0, "logit_bias": {8: 3.0}, "temperature": 0.0},
        {"min_tokens": 4, "stop_token_ids": tuple(range(60))},
        {"frequency_penalty": -2.0, "top_k": 20},
    ],
]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("asks", ASKS, ids=str)
def test_a_chain_draws_what_steps_draw(
    draft: LoadedModel, count: int, asks: list[dict[str, Any]]
) -> None:
    """Law: one graph of K steps samples the same tokens, best and second best, as K forwards with
    the same keyed noise, for any fields, and leaves the same keys and values."""
    ours, theirs = captured(draft, FakeRecorder()), eager(draft)
    theirs._compiled = None
    seqs = [sequence(i, **fields) for i, fields in enumerate(asks[:count])]
    prompts = [Segment(seq.tokens, 0, seq.blocks, 1) for seq in seqs]
    output = ours.forward(prompts)
    theirs.forward(prompts)
    draws = draws_of(draft)
    for steps in (3, 4, 3):
        chains = chained(ours, output, draws, seqs, [steps] * count)
        found = read_chains(chains.drawn.numpy(), count)
        assert found[::2] == both_stepwise(theirs, output.logits, seqs, steps)
        assert all(margin >= 0 for margins in found[1] for margin in margins)


@pytest.mark.parametrize("asks", ASKS, ids=str)
def test_each_sequence_may_have_its_own_number_of_steps(
    draft: LoadedModel, asks: list[dict[str, Any]]
) -> None:
    """Law: a chain draws for each sequence what it would draw alone. It writes no keys or values
    except after the sequences' ends, in their own blocks and in the padding block, and passes no
    position after that of a sequence's last draft token."""
    ours, theirs = captured(draft, FakeRecorder()), eager(draft)
    theirs._compiled = None
    seqs = [sequence(i, **fields) for i, fields in enumerate(asks)]
    prompts = [Segment(seq.tokens, 0, seq.blocks, 1) for seq in seqs]
    draws, positions = draws_of(draft), list[Tensor]()

    def seen(_module: Any, _args: Any, given: dict[str, Any]) -> None:
        positions.append(given["position_ids"][0].clone())

    for steps in ([1, 6, 2], [4, 1, 1], [1, 2, 5], [2, 1, 1]):
        output, logits = ours.forward(prompts), theirs.forward(prompts).logits
        expected = stepwise(theirs, logits, seqs, max(steps))
        near = [sequence(i, **fields) for i, fields in enumerate(asks)]
        for seq, k in zip(near, steps, strict=True):
            seq.blocks = seq.blocks[: -(-(seq.num_tokens + k) // BLOCK)]
        before = [kept.clone() for pair in ours._plane.stacks for kept in pair]
        handle = draft.model.register_forward_pre_hook(seen, with_kwargs=True)
        found = chained(ours, output, draws, near, steps)
        handle.remove()
        own = [tokens[:k] for tokens, k in zip(expected, steps, strict=True)]
        assert found.ids.tolist() == [token for tokens in own for token in tokens]
        chains, *_ = read_chains(found.drawn.numpy(), len(seqs))
        assert [tokens[:k] for tokens, k in zip(chains, steps, strict=True)] == own
        last = [seq.num_tokens + k - 1 for seq, k in zip(seqs, steps, strict=True)]
        assert (torch.stack(positions).amax(0)[: len(seqs)] <= torch.tensor(last)).all()
        positions.clear()
        free = {BLOCKS * BLOCK + i for i in range(BLOCK)}  # the padding block
        for seq in near:
            places = [block * BLOCK + i for block in seq.blocks for i in range(BLOCK)]
            free.update(places[seq.num_tokens :])
        after = [kept for pair in ours._plane.stacks for kept in pair]
        for old, new in zip(before, after, strict=True):
            changed = (old != new).any(dim=-1).any(dim=0).any(dim=0).nonzero()
            assert set(changed.flatten().tolist()) <= free


def test_usual_chains_are_recorded_at_start(draft: LoadedModel) -> None:
    """Bug: chains were recorded within the first request that needed them, and only 16 were kept,
    while K up to 8 has 88. Law: recording a chain for one K leaves those for others intact."""
    recorder = FakeRecorder()
    ours, theirs = captured(draft, recorder, most_steps=3), eager(draft)
    theirs._compiled = None
    [*ours.capture()]
    # Forwards of up to 24 rows; plain chains of 1, 2, 4 and 8 sequences; one of each other kind.
    assert recorder.recorded == 6 + 4 * 3 + 2
    prompt = [Segment(PROMPT, 0, [3, 1, 2, 4], 1)]
    output, seqs = ours.forward(prompt), [sequence(0)]
    theirs.forward(prompt)
    for steps in (3, 2, 3, 1):
        chains = chained(ours, output, draws_of(draft), seqs, [steps]).drawn
        expected = stepwise(theirs, output.logits, seqs, steps)
        assert read_chains(chains.numpy(), len(seqs))[0] == expected
    assert recorder.recorded == 6 + 4 * 3 + 2


def test_all_chains_are_kept(draft: LoadedModel) -> None:
    recorder = FakeRecorder()
    ours = captured(draft, recorder)
    assert ours._chains is not None
    pool, sizes = ours._chains._pool, ours._chains._sizes
    assert pool._most == len(sizes) * MAX_K * 3


def test_uncaptured_attention_is_warmed_up(
    target: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the first long prompt compiled its attention within the request, under a 30 s watchdog.
    Law: warm-up uses free blocks and as many rows as fit in positions and blocks, untimed."""
    ours = captured(target, FakeRecorder())
    seen: list[list[tuple[int, int]]] = []
    prepare = ours.backend.prepare

    def spy(plane: Any, spans: Any) -> Any:
        seen.append([(span.length, span.end) for span in spans])
        assert all(len(span.blocks) * BLOCK >= span.end for span in spans)
        assert {block for span in spans for block in span.blocks} <= set(range(10, 20))
        return prepare(plane, spans)

    monkeypatch.setattr(ours.backend, "prepare", spy)
    for name in ("reached", "recorded"):
        monkeypatch.setattr(Event, name, 0.0)
    ours._timer = DeviceTimer(Event)
    for requested, rows in ((30, 30), (512, 36), (1, 1)):
        seen.clear()
        ours.warm(requested, range(10, 20), BLOCK)
        two = [(rows - 1, rows - 1), (1, 1)] if rows > 1 else [(1, 1)]
        assert seen == [[(1, 1)], [(rows, rows)], two]
    assert ours.seconds == 0.0


@pytest.mark.parametrize("fields", [{}, {"top_p": 0.9}, {"presence_penalty": 1.0}], ids=str)
@pytest.mark.parametrize("steps", [1, 3, 6])
def test_a_proposal_is_one_copy(draft: LoadedModel, steps: int, fields: dict[str, Any]) -> None:
    """Law: one copy brings a proposal to the host, whatever K is."""
    ours = captured(draft, FakeRecorder())
    output = ours.forward([Segment(PROMPT, 0, [3, 1, 2], 1)])
    seqs, draws = [sequence(0, **fields)], draws_of(draft)
    chained(ours, output, draws, seqs, [steps])  # records the graph
    with Waits() as waits:
        chained(ours, output, draws, seqs, [steps]).drawn.tolist()
    assert waits.seen == ["tolist"]


def sequence(i: int, **fields: Any) -> Sequence:
    """Return a prompt in blocks of its own, with room for draft tokens."""
    params = SamplingParams(seed=77 + i, max_tokens=99, **fields)
    blocks = [[3, 1, 2, 4, 5], [9, 8, 7, 6, 10], [20, 21, 22, 23, 24]][i]
    given = array("i", blocks)
    return Sequence(str(i), params, PROMPT[i:], len(PROMPT) - i, blocks=given)


def draws_of(draft: LoadedModel) -> DeviceDraws:
    return DeviceDraws(LogitsProcessor([0]), draft.vocab_size, CPU)


def chained(
    runner: ModelRunner,
    output: ModelOutput,
    draws: DeviceDraws,
    seqs: list[Sequence],
    steps: list[int],
) -> DraftedChains:
    rows = [Rows(seq, 0, k, seq.num_tokens) for seq, k in zip(seqs, steps, strict=True)]
    return runner.unseen_chain(
        output,
        [Start(seq.blocks, seq.num_tokens) for seq in seqs],
        steps=steps,
        table=draws.plan(rows).table,
        held=draws.held(seqs),
    )


def stepwise(
    runner: ModelRunner, logits: Tensor, seqs: list[Sequence], steps: int
) -> list[list[int]]:
    return both_stepwise(runner, logits, seqs, steps)[0]


def both_stepwise(
    runner: ModelRunner, logits: Tensor, seqs: list[Sequence], steps: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Return each sequence's tokens and second-best tokens."""
    draws = DeviceDraws(LogitsProcessor([0]), logits.shape[1], CPU)
    paths: list[list[int]] = [[] for _ in seqs]
    behind: list[list[int]] = [[] for _ in seqs]
    for step in range(steps):
        contexts = [RowContext(seq, path) for seq, path in zip(seqs, paths, strict=True)]
        drawn, _, second_best = draws.draw_draft_adjusted(logits, contexts)
        paths = [[*path, token] for path, token in zip(paths, drawn, strict=True)]
        behind = [[*each, token] for each, token in zip(behind, second_best, strict=True)]
        segments = [
            Segment([token], seq.num_tokens + step, seq.blocks, 1)
            for token, seq in zip(drawn, seqs, strict=True)
        ]
        logits = runner.forward(segments).logits
    return paths, behind


FIELDS: list[list[dict[str, Any]]] = [
    [{"temperature": i / 2} for i in range(3)],
    [{"top_p": 0.8}, {"temperature": 0.7, "top_k": 9, "min_p": 0.05}, {"temperature": 0.0}],
    [{"top_k": 3}, {"presence_penalty": 0.7}, {"logit_bias": {7: 2.0}}],
]


@pytest.mark.parametrize("fields", FIELDS, ids=str)
@pytest.mark.parametrize("k", [0, 4])
def test_an_engine_of_graphs_writes_the_reference_text(
    k: int, fields: list[dict[str, Any]], target: LoadedModel, draft: LoadedModel,
    tiny_eos: list[int], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Law: graphs and draws on the device do not change the text, with a draft and without."""
    recorder = FakeRecorder()
    cache = KVCache(64, BLOCK, "cpu", padding_block=True)

    def runner(config: EngineConfig, model: LoadedModel, *_: object, **__: object) -> ModelRunner:
        backend = FlashInferBackend(CPU, PagedPrefill)
        made = ModelRunner(model, cache, model.role, backend=backend, graphs=Graphs(recorder, 24))
        made._compiled = None
        return made

    monkeypatch.setattr("engine.core.runner_of", runner)
    monkeypatch.setattr("engine.core.build_draws", DeviceDraws)
    config = EngineConfig.model_validate(
        {
            "target": {"path": target.path},
            "device": "cpu",
            "cache": {"block_size": BLOCK, "num_blocks": 64},
            "speculation": {
                "proposer": {"path": draft.path},
                "controller": {"kind": "fixed", "k": k},
            },
        }
    )
    engine = Engine(config, pair=Pair(target, draft))
    params = [
        SamplingParams(seed=i, max_tokens=9, ignore_eos=True, **more)
        for i, more in enumerate(fields)
    ]
    for i, sampling_params in enumerate(params):
        engine.add(Submit(str(i), PROMPT[: 5 + i], sampling_params, 0.0))
    found: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step().items:
            found.setdefault(output.id, []).extend(output.tokens)
    assert recorder.replayed > 0
    reference = Reference(target.path, tiny_eos)
    for i, sampling_params in enumerate(params):
        assert found[str(i)] == reference.generate(PROMPT[: 5 + i], sampling_params)[0]


def test_a_device_by_number_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: with `device = "cuda:1"`, timing and capture used streams of the first device."""
    devices: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    for name in ("cpu", "cuda", "cuda:1"):
        use_device(torch.device(name))
    assert devices == [torch.device("cuda:1")]


@pytest.mark.parametrize("waits", [True, False])
def test_a_synchronizing_forward_is_not_captured(
    waits: bool,
    target: LoadedModel,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bug: for Llamas with dynamic NTK, capture failed with a CUDA error."""
    monkeypatch.setattr("engine.model.pair.waits_for_device", lambda _: "f" if waits else None)
    model = replace(target, device=torch.device("cuda"))
    config = EngineConfig.model_validate({"schedule": {"max_step_tokens": 77}})
    with caplog.at_level("INFO"):
        graphs = _graphs_of(config, model)
    assert (graphs is None) == waits == ("waits for the device (in f)" in caplog.text)
    assert graphs is None or graphs.most_rows == 77


def test_a_synchronizing_function_is_named(
    target: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: torch's sync debug mode, set for one forward, finds it; other errors propagate."""
    message, modes = "called a synchronizing CUDA operation", list[str]()
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def dynamic_frequency_update(*_given: object, **_named: object) -> torch.Tensor:
        raise RuntimeError(message)

    assert waits_for_device(target) is None
    model = replace(target, logits=dynamic_frequency_update)
    assert waits_for_device(model) == "dynamic_frequency_update"
    message = "out of memory"
    with pytest.raises(RuntimeError, match=message):
        waits_for_device(model)
    assert modes == ["error", "default"] * 3


class Event:
    """A device event; `query` is true once the device has reached it."""

    reached = 0.0
    recorded = 0.0

    def __init__(self) -> None:
        self.at = 0.0

    def record(self, stream: None) -> None:
        Event.recorded += 10.0
        self.at = Event.recorded

    def query(self) -> bool:
        return self.at <= Event.reached

    def elapsed_time(self, other: Event) -> float:
        return other.at - self.at

    def synchronize(self) -> None:
        Event.reached = max(Event.reached, self.at)


def test_reading_device_time_does_not_block() -> None:
    """Law: `read` returns finished device time once and never blocks; only `wait` blocks."""
    timer = DeviceTimer(Event)
    for _ in range(2):
        with timer:
            pass
    assert timer.read() == 0.0
    Event.reached = 20.0
    assert timer.read() == pytest.approx(0.010)
    assert timer.read() == 0.0
    timer.wait()
    assert timer.read() == pytest.approx(0.010)


def test_late_device_time_is_verification() -> None:
    """Law: device time seen late moves to verify or propose; the sum is kept; no-op on CPU."""
    seconds = StepSeconds(verify=1.0, accept=5.0, verify_forward=4.0)
    move_late_seconds(seconds)
    assert (seconds.verify, seconds.accept) == (4.0, 2.0)
    move_late_seconds(seconds)
    assert (seconds.verify, seconds.accept) == (4.0, 2.0)
    seconds = StepSeconds(
        propose=1.0, propose_forward=3.0, verify=1.0, accept=5.0, verify_forward=6.0
    )
    move_late_seconds(seconds)
    assert (seconds.propose, seconds.verify, seconds.accept) == (3.0, 4.0, 0.0)
