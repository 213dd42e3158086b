"""`python -m tests.cuda_host.measure`, on the stand-in: print what steps of an 8 B pair ask of the
device, as one line of JSON, which `limits` turns into a table.

The target has the shape of Llama 3.1 8B, the draft that of Llama 3.2 1B, both in bfloat16.
Attention is our kernel (`triton`), K is 4, each prompt has 1000 tokens. Numbers from the device are
zeros, so every draft token is accepted, and a step adds five tokens to each sequence. It repeats
this with sequences that all request `limits.FIELDS`, and with `flashinfer` (`planned`).
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import LlamaConfig

from engine.config import EngineConfig, Role
from engine.core import Engine
from engine.messages import SamplingParams, Submit
from engine.model.graphs import CudaRecorder, GraphPool, Recorded
from engine.model.kv_cache import KVCache
from engine.model.loader import load_model
from engine.model.pair import load_pair, runner_of
from engine.sampling.device_draws import read_in_one_copy
from engine.step import rounds
from tests.cuda_host.counts import StandIn
from tests.cuda_host.limits import FIELDS, SEQUENCES, STEPS
from tests.cuda_host.planned import install
from tests.cuda_host.valueless import without_values

K = 4
PROMPT = 1000
WARM = 8  # steps after the prompts that are not counted
CYCLE = 16  # steps of five tokens, which enter blocks of 16 tokens at every offset
TIMED = 40
ROWS = 8  # of the forwards whose nodes are reported: five, padded
FEW = 2  # layers of a small model; the difference to the whole one gives the nodes of a layer

EIGHT_B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
ONE_B = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    "tie_word_embeddings": True,
}  # fmt: skip
COMMON = {
    "vocab_size": 128256, "max_position_embeddings": 131072, "bos_token_id": None,
    "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip


class Nodes:
    """Nodes and kernels of the first captured graph of each recorder and result shape, and nodes of
    the last, while this object exists. Keys: the recorder's number, the shape."""

    def __init__(self, standin: StandIn) -> None:
        self.found: dict[tuple[int, tuple[int, ...]], int] = {}
        self.last: dict[tuple[int, tuple[int, ...]], int] = {}
        self.draws: dict[tuple[int, tuple[int, ...]], int] = {}
        self.kernels: dict[tuple[int, tuple[int, ...]], Counter[str]] = {}
        recorders: list[CudaRecorder] = []
        record = CudaRecorder.record

        def recorded(recorder: CudaRecorder, run: Callable[[], Tensor]) -> Recorded:
            done = record(recorder, run)
            if recorder not in recorders:
                recorders.append(recorder)
            key = recorders.index(recorder), tuple(done.output.shape)
            self.last[key] = standin.counts["last graph nodes"]
            self.found.setdefault(key, self.last[key])
            self.draws.setdefault(key, standin.drawing)
            self.kernels.setdefault(key, standin.captured)
            return done

        mock.patch.object(CudaRecorder, "record", recorded).start()

    def forward(self, recorder: int, rows: int) -> tuple[int, int]:
        """Return the forward's nodes without those that draw from its logits, and the latter."""
        [key, *_] = [key for key in self.found if key[0] == recorder and key[1][:-1] == (rows,)]
        return self.found[key] - self.draws[key], self.draws[key]

    def layer(self, whole: int, few: int, layers: int) -> dict[str, float]:
        """Return the kernels of one layer, from two recorders whose models differ by `layers`."""
        kernels = [
            next(k for (r, shape), k in self.kernels.items() if r == one and shape[:-1] == (ROWS,))
            for one in (whole, few)
        ]
        kernels[0].subtract(kernels[1])
        return {name: number / layers for name, number in kernels[0].most_common() if number}


def config_in(folder: Path, role: str, sizes: dict[str, Any]) -> str:
    place = folder / role
    LlamaConfig(**(COMMON | sizes)).save_pretrained(place)
    return str(place)


def config_of(folder: Path) -> EngineConfig:
    draft = {"path": config_in(folder, "draft", ONE_B), "dtype": "bfloat16"}
    return EngineConfig.model_validate(
        {
            "device": "cuda",
            "attention": "triton",
            "target": {"path": config_in(folder, "target", EIGHT_B), "dtype": "bfloat16"},
            "speculation": {
                "proposer": draft, "controller": {"kind": "adaptive"}, "companions": [],
            },
        }
    )  # fmt: skip


def nodes_of_few_layers(
    folder: Path, config: EngineConfig, role: Role, sizes: dict[str, Any]
) -> None:
    """Capture forwards of up to eight rows of a model with `FEW` layers."""
    path = config_in(folder, f"few-{role}", sizes | {"num_hidden_layers": FEW})
    model = load_model(path, role=role, dtype="bfloat16", device="cuda")
    few = config.model_copy(
        update={"schedule": config.schedule.model_copy(update={"max_step_tokens": ROWS})}
    )
    cache = KVCache(64, config.cache.block_size, model.device, padding_block=True)
    runner_of(few, model, cache)


def started(config: EngineConfig) -> tuple[Engine, dict[str, float]]:
    """Return an engine at fixed `K`, and the CPU seconds for building the models and for the rest
    (compilation that is not cached, captures, the profile)."""
    times = [sum(os.times()[:4])]  # includes child processes, which assemble kernels
    pair = load_pair(config)
    times.append(sum(os.times()[:4]))
    engine = Engine(config, pair=pair)
    times.append(sum(os.times()[:4]))
    engine.set_speculation("fixed", K)
    return engine, {"models": times[1] - times[0], "engine": times[2] - times[1]}


def serve(engine: Engine, number: int, fields: dict[str, Any]) -> None:
    """Add `number` sequences, and run until all are past their prompts and warmed up."""
    for i in range(number):
        params = SamplingParams(seed=i, max_tokens=4000, ignore_eos=True, **fields)
        prompt = [(7 * i + j) % 1000 + 5 for j in range(PROMPT)]
        engine.add(Submit(f"{number}-{i}", prompt, params, 0.0))
    warm = 0
    while warm < WARM:
        items = engine.step().items
        warm += len(items) == number and all(len(item.tokens) == K + 1 for item in items)


@contextmanager
def pausing(found: list[float]) -> Iterator[None]:
    """Collect the host thread's milliseconds from reading a step's tokens to the next graph, while
    the device is idle."""
    read, replay, last = read_in_one_copy, GraphPool.replay, list[float]()

    def reading(*given: Any) -> Any:
        numbers = read(*given)
        last.append(time.thread_time())
        return numbers

    def replaying(*given: Any) -> Any:
        found.extend((time.thread_time() - began) * 1e3 for began in last)
        last.clear()
        return replay(*given)

    with (
        mock.patch.object(rounds, "read_in_one_copy", reading),
        mock.patch.object(GraphPool, "replay", replaying),
    ):
        yield


def measured(
    engine: Engine, standin: StandIn, number: int, fields: dict[str, Any]
) -> dict[str, Any]:
    """Return the maximum of each of `STEPS` in any of `CYCLE` steps, the host thread's
    milliseconds, and who asks for what, as (what, where, times a step, bytes a step)."""
    serve(engine, number, fields)
    most = Counter({step.name: 0 for step in STEPS})
    for _ in range(CYCLE):
        standin.lap()
        engine.step()
        counts = standin.lap()
        for step in STEPS:
            count = sum(counts[name] for name in step.counters)
            most[step.name] = max(most[step.name], count)
    with standin.watched() as found:
        for _ in range(CYCLE):
            engine.step()
    places = [(*key, n / CYCLE, size / CYCLE) for key, (n, size) in found.items()]
    times, pauses = list[float](), list[float]()
    with pausing(pauses):
        for _ in range(TIMED):
            began = time.thread_time()
            engine.step()
            times.append((time.thread_time() - began) * 1e3)
    engine.abort([f"{number}-{i}" for i in range(number)])
    engine.step()
    times.sort()
    return {
        "most": most,
        "milliseconds": {"least": times[0], "median": times[TIMED // 2]},
        "pause": min(pauses),
        "places": sorted(places, key=lambda each: (each[0], -each[3], -each[2])),
    }


def by_flashinfer(config: EngineConfig, standin: StandIn) -> dict[int, dict[str, Any]]:
    """Measure the same steps with FlashInfer's planned attention."""
    install()
    engine, _ = started(config.model_copy(update={"attention": "flashinfer"}))
    return {number: measured(engine, standin, number, {}) for number in SEQUENCES}


def nodes_found(nodes: Nodes) -> dict[str, float]:
    """Return the nodes of each part. The recorders are the draft's, the target's, and those of the
    two small models. A layer has the same nodes in all forwards of at most eight rows."""
    (draft, _), (target, draws), (few_target, _), (few_draft, _) = (
        nodes.forward(recorder, ROWS) for recorder in range(4)
    )
    return {
        "target layer": (target - few_target) / (EIGHT_B["num_hidden_layers"] - FEW),
        "target forward": target,
        "draw behind it": draws,
        "draft layer": (draft - few_draft) / (ONE_B["num_hidden_layers"] - FEW),
        "draft forward": draft,
        "chain of four": nodes.found[0, (3, K, 1)],
        "chain of four, all fields": nodes.last[0, (3, K, 1)],
    }


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    without_values()
    standin = StandIn()
    nodes = Nodes(standin)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = config_of(folder)
        engine, start = started(config)
        nodes_of_few_layers(folder, config, "target", EIGHT_B)
        nodes_of_few_layers(folder, config, "draft", ONE_B)
        steps = {number: measured(engine, standin, number, {}) for number in SEQUENCES}
        by_fields = {
            name: {number: measured(engine, standin, number, fields) for number in SEQUENCES}
            for name, fields in FIELDS.items()
        }
        del engine
        gc.collect()  # otherwise two pairs would not fit
        planned = by_flashinfer(config, standin)
    standin.lap()
    found = {
        "violations": standin.violations,
        "start": start,
        "nodes": nodes_found(nodes),
        "kernels": nodes.layer(1, 2, EIGHT_B["num_hidden_layers"] - FEW),
        "steps": steps,
        "fields": by_fields,
        "flashinfer": planned,
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
