"""What the benchmark runs: our engine under one configuration, or transformers' own generation.

A contender turns a prompt into exactly `tokens` ids (end-of-text does not end it, so that all do
the same work) and says how long that took, prompt included. All share one loaded pair.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from engine.config import EngineConfig
from engine.core import Engine
from engine.lab.bench.seconds import Clock
from engine.messages import Grammar, SamplingParams, StepMetrics, Submit
from engine.model.pair import Pair

LONGEST_PROMPT = 512  # tokens
SLACK = 16  # rows of a proposal beyond the last token
BLOCK_SIZE = 16


@dataclass
class Totals:
    """Sums over steps. `*_at[d]`: proposals that reached depth d+1, and those kept there."""

    steps: int = 0
    rounds: int = 0
    generated: int = 0
    seconds: float = 0.0
    forward_seconds: float = 0.0
    proposed_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    k_counts: list[int] = field(default_factory=list)

    def add(self, metrics: StepMetrics) -> None:
        s = metrics.seconds
        self.steps += 1
        self.rounds += metrics.num_sampling
        self.generated += metrics.num_generated_tokens
        self.seconds += s.schedule + s.propose + s.verify + s.accept + s.commit + s.emit
        self.forward_seconds += s.propose_forward + s.verify_forward
        _add(self.proposed_at, metrics.proposed_at)
        _add(self.accepted_at, metrics.accepted_at)
        _add(self.k_counts, metrics.k_counts)

    @property
    def host_share(self) -> float:
        """Of the time of a step, the part outside the models' forwards."""
        return 1 - self.forward_seconds / self.seconds

    @property
    def tokens_per_round(self) -> float:
        return self.generated / self.rounds

    @property
    def mean_k(self) -> float:
        return sum(k * count for k, count in enumerate(self.k_counts)) / sum(self.k_counts)

    @property
    def acceptance(self) -> list[float]:
        """By position: of the guesses there, how many were kept."""
        pairs = zip(self.accepted_at, self.proposed_at, strict=True)
        return [accepted / proposed for accepted, proposed in pairs if proposed]


def _add(sums: list[int], more: Sequence[int]) -> None:
    sums.extend([0] * (len(more) - len(sums)))
    for i, amount in enumerate(more):
        sums[i] += amount


class Contender(Protocol):
    """`run` answers the ids and the seconds of one prompt."""

    name: str

    def run(
        self, prompt: Sequence[int], *, temperature: float, seed: int
    ) -> tuple[list[int], float]: ...


class EngineContender:
    """Our engine. `totals[temperature]` gathers what its steps said."""

    def __init__(
        self,
        name: str,
        speculation: dict[str, Any],
        *,
        pair: Pair,
        tokens: int,
        sequences: int = 1,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.name = name
        self.totals: dict[float, Totals] = {}
        self._tokens = tokens
        self._clock = clock
        # No prefix cache: prompts are repeated here, and a hit would flatter every repetition.
        num_blocks = sequences * -(-(LONGEST_PROMPT + tokens + SLACK) // BLOCK_SIZE)
        config = EngineConfig.model_validate(
            {
                "target": {"path": pair.target.path},  # whose tokenizer grammars are about
                "cache": {
                    "prefix_caching": False,
                    "block_size": BLOCK_SIZE,
                    "num_blocks": num_blocks,
                    "cpu_memory_gib": 64,
                },
                "schedule": {"max_sequences": sequences},
                "speculation": speculation,
            }
        )
        alone = config.speculation.proposer.kind == "none"
        self._engine = Engine(config, pair=Pair(pair.target) if alone else pair, clock=clock)
        self._count = 0

    def run(
        self,
        prompt: Sequence[int],
        *,
        temperature: float,
        seed: int,
        prediction: Sequence[int] = (),
        grammar: Grammar | None = None,
    ) -> tuple[list[int], float]:
        """Under a grammar the reply ends where that is complete."""
        texts, seconds = self.run_all(
            [prompt], temperature=temperature, seed=seed, prediction=prediction, grammar=grammar
        )
        return texts[0], seconds

    def run_all(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        temperature: float,
        seed: int,
        prediction: Sequence[int] = (),
        grammar: Grammar | None = None,
    ) -> tuple[list[list[int]], float]:
        """All prompts at once, as one batch, all with this prediction and grammar; their ids in
        order."""
        totals = self.totals.setdefault(temperature, Totals())
        replies: dict[str, list[int]] = {}
        started = self._clock()
        for i, prompt in enumerate(prompts):
            params = SamplingParams(
                seed=seed + i,
                max_tokens=self._tokens,
                temperature=temperature,
                ignore_eos=True,
                prediction=tuple(prediction),
                grammar=grammar,
            )
            name = f"{self._count}-{i}"
            replies[name] = []
            self._engine.add(Submit(name, list(prompt), params, 0.0))
        while self._engine.has_work:
            outputs = self._engine.step()
            totals.add(outputs.metrics)
            for output in outputs.items:
                assert output.error is None, output.error
                replies[output.id] += output.tokens
        self._count += 1
        return list(replies.values()), self._clock() - started


class TransformersContender:
    """`generate` of transformers on the same files, in the same dtype, on the same device."""

    def __init__(
        self,
        name: str,
        *,
        model: Any,
        assistant: Any = None,
        tokens: int,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.name = name
        self._model = model
        self._options: dict[str, Any] = {"max_new_tokens": tokens, "eos_token_id": None}
        if assistant is not None:
            self._options["assistant_model"] = assistant
        self._clock = clock

    def run(
        self, prompt: Sequence[int], *, temperature: float, seed: int
    ) -> tuple[list[int], float]:
        torch.manual_seed(seed)
        ids = torch.tensor([list(prompt)], device=self._model.device)
        sampling = (
            {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
            if temperature
            else {"do_sample": False}
        )
        started = self._clock()
        with torch.inference_mode():
            output = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), **self._options, **sampling
            )
        reply = output[0, len(prompt) :].tolist()
        return reply, self._clock() - started


def load_plain(folder: str, dtype: torch.dtype, device: torch.device) -> Any:
    """A model as transformers loads it. Its own end-of-text is forgotten, so that it goes on."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    speech: Any = logging  # untyped
    speech.set_verbosity_error()
    speech.disable_progress_bar()
    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=dtype).to(device).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model
