"""A new draft replaces the running one: texts stay the same, an unfit draft is refused in a
sentence, and a worse one is rolled back. Nothing is random: K is fixed where costs would decide."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig, model_folder
from engine.core import Engine
from engine.errors import ConfigError
from engine.messages import Output, SamplingParams, Submit, Swap
from engine.model.pair import Pair, load_pair
from engine.step import draft_swap
from tests.support import tiny, tiny_text, two_tokenizers

WEIGHTS = "model.safetensors"
PATIENCE = 120.0  # seconds


def configured(**more: Any) -> EngineConfig:
    return EngineConfig.model_validate({"device": "cpu", "cache": {"num_blocks": 256}, **more})


FIXED = configured(speculation={"controller": {"kind": "fixed", "k": 3}, "companions": []})


@pytest.fixture(scope="module")
def pair() -> Pair:
    return load_pair(FIXED)


@pytest.fixture(scope="module")
def same(tmp_path_factory: pytest.TempPathFactory) -> str:
    return copied(tmp_path_factory.mktemp("drafts") / "same")


@pytest.fixture(scope="module")
def random(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Save a draft of the same shape with random weights."""

    def drawn(weights: dict[str, torch.Tensor]) -> None:
        generator = torch.Generator().manual_seed(1)
        for name, weight in weights.items():
            if weight.dim() > 1:
                noise = torch.randn(weight.shape, generator=generator)
                weights[name] = (noise * weight.float().std()).to(weight.dtype)

    return copied(tmp_path_factory.mktemp("drafts") / "random", weights=drawn)


def copied(
    folder: Path,
    *,
    weights: Callable[[dict[str, torch.Tensor]], object] | None = None,
    config: Callable[[dict[str, Any]], object] | None = None,
) -> str:
    """Save a copy of the built-in draft with changes."""
    shutil.copytree(model_folder("demo", "draft"), folder)
    if weights is not None:
        held = {name: weight.clone() for name, weight in load_file(folder / WEIGHTS).items()}
        weights(held)
        save_file(held, folder / WEIGHTS, {"format": "pt"})
    if config is not None:
        settings = json.loads((folder / "config.json").read_text())
        config(settings)
        (folder / "config.json").write_text(json.dumps(settings))
    return str(folder)


def submit(engine: Engine, count: int, temperature: float = 0.0, max_tokens: int = 120) -> None:
    for i in range(count):
        params = SamplingParams(
            seed=i, max_tokens=max_tokens, temperature=temperature, ignore_eos=True
        )
        engine.add(Submit(str(i), [40 + i, 7, 9 + i], params, 0.0))


def next_swap(engine: Engine, outcomes: tuple[str, ...] = ("trial", "refused")) -> Swap:
    """Step, always with work to do, until the outcome of a swap is reported; return it."""
    texts = dict[str, list[int]]()
    return play(engine, texts, until=outcomes)


def play(engine: Engine, texts: dict[str, list[int]], *, until: tuple[str, ...]) -> Swap:
    """Like `next_swap`, and collect the generated tokens in `texts`."""
    for _ in range(100_000):
        done = engine.step()
        add(texts, done.items)
        if done.metrics.swap is not None and done.metrics.swap.outcome in until:
            return done.metrics.swap
        if not engine.has_work:
            submit(engine, 4)
    raise AssertionError("no news of the draft came in time")


def add(texts: dict[str, list[int]], items: list[Output]) -> None:
    for item in items:
        texts.setdefault(item.id, []).extend(item.tokens)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("config", [FIXED, configured()], ids=["fixed", "adaptive"])
def test_running_and_later_texts_stay_the_same(
    config: EngineConfig, pair: Pair, same: str, random: str, temperature: float
) -> None:
    """Law: whichever draft proposes, and whenever it is swapped, a seed's text stays the same."""

    def texts(drafts: list[str]) -> dict[str, list[int]]:
        engine, found, left = Engine(config, pair=pair), dict[str, list[int]](), list(drafts)
        submit(engine, 3, temperature, max_tokens=160)
        swaps = 0
        while engine.has_work or left:
            if left and not engine._swap._loading and not engine._swap._pieces:
                engine.swap_draft(left.pop(0))
            done = engine.step()
            add(found, done.items)
            swaps += done.metrics.swap is not None and done.metrics.swap.outcome == "trial"
            assert engine.has_work or swaps == len(drafts), "some came after the texts"
        assert swaps == len(drafts)
        return found

    with patch.object(threading, "Thread", AtOnce):
        assert texts([random, same, random]) == texts([])


class AtOnce(threading.Thread):
    """A thread that runs to its end in `start`: used while texts are short."""

    def start(self) -> None:
        self.run()


def test_steps_continue_while_it_loads(pair: Pair, same: str) -> None:
    """Law: no step waits for reading a file, a proof or compilation."""
    engine, allowed = Engine(FIXED, pair=pair), threading.Event()
    read = engine._swap._read
    with patch.object(engine._swap, "_read", lambda path: allowed.wait(PATIENCE) and read(path)):
        submit(engine, 2)
        engine.swap_draft(same)
        with pytest.raises(ConfigError, match="is being loaded"):
            engine.swap_draft(same)
        while engine.has_work:
            engine.step()
        assert not engine._swap.is_due, "nor does an idle engine turn"
        allowed.set()
    assert next_swap(engine).outcome == "trial"


def test_a_useless_draft_is_rolled_back(pair: Pair, random: str) -> None:
    """Law: the previous draft proposes again, as well as before."""
    engine = Engine(configured(speculation={"companions": []}), pair=pair)
    submit(engine, 4)
    engine.swap_draft(random)
    assert next_swap(engine).running == random
    end = next_swap(engine, ("kept", "taken_back"))
    assert (end.outcome, end.draft, end.running) == ("taken_back", random, "demo")
    assert "tokens it would have proposed" in end.message
    texts = dict[str, list[int]]()
    while engine.has_work:
        add(texts, engine.step().items)
    submit(engine, 4)
    engine.set_speculation("fixed", 3)
    proposed = accepted = 0
    while engine.has_work:
        metrics = engine.step().metrics
        proposed, accepted = proposed + metrics.num_proposed, accepted + metrics.num_accepted
    assert accepted > 0.3 * proposed > 0


def test_a_verdict_during_the_next_load_names_its_own_draft(
    pair: Pair, same: str, random: str
) -> None:
    """Law: a verdict names its own draft; the third draft replaces the one then running."""
    engine, allowed = Engine(FIXED, pair=pair), threading.Event()
    submit(engine, 4)
    engine.swap_draft(random)
    assert next_swap(engine).outcome == "trial"
    read = engine._swap._read
    with patch.object(engine._swap, "_read", lambda path: allowed.wait(PATIENCE) and read(path)):
        engine.swap_draft(same)
        end = next_swap(engine, ("kept", "taken_back"))
        assert (end.draft, end.outcome, end.running) == (random, "taken_back", "demo")
        allowed.set()
    end = next_swap(engine)
    assert (end.draft, end.outcome, end.running) == (same, "trial", same)


@pytest.mark.parametrize("config", [FIXED, configured()], ids=["fixed", "adaptive"])
def test_an_equal_draft_is_kept(pair: Pair, same: str, config: EngineConfig) -> None:
    """Law: a draft that is not significantly worse stays, and the old one is released. Bug: the
    noise of two timings made a copy of the running draft be rolled back."""
    engine = Engine(config, pair=pair)
    submit(engine, 4)
    engine.swap_draft(same)
    next_swap(engine)
    end = next_swap(engine, ("kept", "taken_back"))
    assert (end.outcome, end.running) == ("kept", same)
    assert engine._swap._previous is None


def test_catching_up_stays_within_a_step(pair: Pair, same: str) -> None:
    """Law: after a swap, long texts catch up in turns; each gets draft tokens in the end."""
    most = 64
    config = EngineConfig.model_validate(
        {**FIXED.model_dump(), "schedule": {"max_step_tokens": most}}
    )
    engine = Engine(config, pair=pair)
    submit(engine, 5, max_tokens=150)
    while engine._scheduler.mean_length() < 60:
        engine.step()
    engine._swap._next_comparison = float("inf")
    with patch.object(threading, "Thread", AtOnce):
        engine.swap_draft(same)
    while not engine._swap._previous:
        engine.step()
    engine._swap._next_comparison = float("inf")
    rows = [engine._proposer.catch_up_rows]
    while engine._allowance._catch_up_rows is not None:
        engine.step()
        rows.append(engine._proposer.catch_up_rows)
    assert max(rows) <= most + 10 * 4
    assert len(rows) > 2
    assert all(seq.num_tokens - seq.num_draft_computed < 8 for seq in engine._scheduler.running)


def long_running(pair: Pair) -> Engine:
    """Return an engine that has drafted for some long texts, with 64 rows a step."""
    settings = {**FIXED.model_dump(), "schedule": {"max_step_tokens": 64}}
    engine = Engine(EngineConfig.model_validate(settings), pair=pair)
    submit(engine, 5, max_tokens=300)
    while engine._scheduler.mean_length() < 60:
        engine.step()
    return engine


def most_catch_up(engine: Engine, steps: int = 12) -> int:
    """Return the most rows of catch-up in a step."""
    rows = list[int]()
    for _ in range(steps):
        engine.step()
        rows.append(engine._proposer.catch_up_rows)
    return max(rows)


def test_an_unreadable_draft_costs_the_running_one_nothing(pair: Pair, tmp_path: Path) -> None:
    """Bug: when a draft could not even be read, the running one forgot all texts, and read them
    again in a single step."""
    engine = long_running(pair)
    with patch.object(threading, "Thread", AtOnce):
        engine.swap_draft(str(tmp_path / "nothing"))
    assert most_catch_up(engine) <= 5 * 4


def test_after_a_late_refusal_texts_catch_up_in_turns(pair: Pair, same: str) -> None:
    """Bug: the running draft read all texts again in a single step."""
    engine = long_running(pair)
    with (
        patch.object(threading, "Thread", AtOnce),
        patch.object(draft_swap, "warm_up", side_effect=ConfigError("no memory")),
    ):
        engine.swap_draft(same)
        assert 5 * 4 < most_catch_up(engine) <= 2 * 64 + 5 * 4
    assert engine._swap._previous is None
    assert all(seq.num_tokens - seq.num_draft_computed < 8 for seq in engine._scheduler.running)


class Trap:
    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (str(Path(__file__).with_name("sprung")), "w"))


def pickled(folder: Path) -> str:
    path = Path(copied(folder, config=lambda settings: settings.update(model_type="qwen2")))
    (path / WEIGHTS).unlink()
    (path / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    return str(path)


def of_another_vocabulary(folder: Path) -> str:
    return tiny.save(tiny.llama({**tiny.GROUPED, "max_position_embeddings": 2048}), folder)


def without(name: str) -> Callable[[Path], str]:
    return lambda folder: copied(folder, weights=lambda held: held.pop(name))


def narrow(folder: Path) -> str:
    return copied(
        folder,
        weights=lambda held: held.update(
            {name: weight[:, :-2].contiguous() for name, weight in held.items() if "q_proj" in name}
        ),
    )


def in_int8(folder: Path) -> str:
    return copied(folder, weights=lambda held: held.update({NORM: held[NORM].to(torch.int8)}))


def piped(folder: Path) -> str:
    path = Path(copied(folder))
    (path / WEIGHTS).unlink()
    os.mkfifo(path / WEIGHTS)
    return str(path)


NORM = "model.layers.0.input_layernorm.weight"
BAD: dict[str, tuple[Callable[[Path], str], str]] = {
    "nothing": (lambda folder: str(folder), "was not found: give a folder with config.json"),
    "empty": (lambda folder: str(folder.parent), "has no config.json"),
    "no JSON": (
        lambda folder: copied(folder, config=lambda settings: settings.clear()),
        "configuration",
    ),
    "encoder": (
        lambda folder: copied(
            folder,
            config=lambda settings: settings.update(model_type="t5", architectures=["T5Model"]),
        ),
        "encoder-decoder",
    ),
    "no tensor": (without(NORM), NORM),
    "narrow tensor": (narrow, "q_proj"),
    "integers": (in_int8, f"{NORM}: int8"),
    "code": (pickled, "could not be loaded: it is not tensors alone"),
    "pipe": (piped, "is not a regular file"),
    "vocabulary": (of_another_vocabulary, "have 128 and 4096 tokens"),
    "positions": (
        lambda folder: copied(
            folder, config=lambda settings: settings.update(max_position_embeddings=64)
        ),
        "it has 64 positions",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_an_unfit_draft_is_refused_with_a_sentence(pair: Pair, tmp_path: Path, name: str) -> None:
    """Law: the sentence names what is wrong, and the running draft keeps drafting."""
    make, words = BAD[name]
    path = make(tmp_path / "draft")
    engine = Engine(FIXED, pair=pair)
    runner = engine._swap._running.runner if engine._swap._running else None
    submit(engine, 2)
    engine.swap_draft(path)
    end = next_swap(engine)
    assert (end.outcome, end.running) == ("refused", "demo")
    assert words in end.message
    assert path in end.message
    assert "\n" not in end.message
    assert engine._proposer._main._runner is runner  # type: ignore[attr-defined]
    assert not Path(__file__).with_name("sprung").exists()


@pytest.mark.parametrize(
    ("speculation", "words"),
    [
        ({"proposer": {"kind": "ngram"}}, "the proposer is 'ngram'"),
        ({"proposer": {"kind": "none"}}, "the proposer is 'none'"),
        ({"proposer": {"kind": "self", "layers": 1}}, "the proposer is 'self'"),
        ({"trace": "TRACE"}, "speculation.trace"),
    ],
)
def test_where_no_draft_can_be_swapped(
    same: str, tmp_path: Path, speculation: dict[str, Any], words: str
) -> None:
    """Law: it is refused at once, naming the proposer or the key that prevents it."""
    if "trace" in speculation:
        speculation = {"trace": str(tmp_path / "trace")}
    engine = Engine(configured(speculation=speculation))
    engine.swap_draft(same)
    end = engine.gauges().swap
    assert end is not None
    assert (end.outcome, engine.gauges().swap) == ("refused", None)
    assert words in end.message


def test_a_tokenizer_of_its_own_is_configured_not_swapped(tmp_path: Path) -> None:
    """Law: a swap is refused if either draft has a tokenizer of its own."""
    target, foreign = two_tokenizers.save(tmp_path)
    native = tiny_text.save(tiny.draft_of(tiny_text.target()), tmp_path / "native")
    for running, new in ((native, foreign), (foreign, native)):
        config = configured(
            target={"path": target},
            speculation={"proposer": {"path": running}, "controller": {"kind": "fixed", "k": 2}},
        )
        engine = Engine(config)
        engine.swap_draft(new)
        end = next_swap(engine)
        assert (end.outcome, end.running) == ("refused", running)
        assert f"{foreign!r} has a tokenizer of its own" in end.message


def test_another_shape_needs_room(tiny_target: str, tiny_draft: str, tmp_path: Path) -> None:
    """Law: its KV must fit beside that of the running draft, else a refusal gives the numbers."""
    config = configured(
        target={"path": tiny_target},
        speculation={"proposer": {"path": tiny_draft}, "controller": {"kind": "fixed", "k": 2}},
    )
    two = tiny.save(tiny.draft_of(tiny.llama(), 2), tmp_path / "two")
    engine = Engine(config)
    plane = engine._cache.planes["draft"]
    engine.swap_draft(two)
    with patch.object(draft_swap, "device_limit", lambda *_: (1000, "cpu")):
        end = next_swap(engine)
    assert end.outcome == "refused"
    assert "may be used on cpu" in end.message
    assert engine._cache.planes["draft"] is plane
    engine.swap_draft(two)
    assert next_swap(engine).outcome == "trial"
    assert engine._cache.planes["draft"] is not plane


@pytest.mark.parametrize("family", [*tiny.FAMILIES])
def test_no_step_depends_on_what_is_loaded(family: str, tmp_path: Path, tiny_draft: str) -> None:
    """Law: while transformers builds a model in bfloat16, this is torch's default dtype in all
    threads; no text may depend on that."""
    path = tiny.save(tiny.FAMILIES[family](), tmp_path / family)
    config = configured(
        target={"path": path}, speculation={"proposer": {"kind": "ngram"}, "companions": []}
    )

    def texts() -> dict[str, list[int]]:
        found = dict[str, list[int]]()
        for penalty, top_p in ((0.0, 1.0), (0.5, 0.9)):
            params = SamplingParams(
                seed=3, max_tokens=24, ignore_eos=True, presence_penalty=penalty, top_p=top_p
            )
            engine.add(Submit(str(len(found)), [5, 6, 5, 6, 5], params, 0.0))
            while engine.has_work:
                add(found, engine.step().items)
        return found

    engine = Engine(config)
    plain = texts()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert texts() == plain
    finally:
        torch.set_default_dtype(torch.float32)
