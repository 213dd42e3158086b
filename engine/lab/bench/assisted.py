"""Run transformers' own generation as arms beside our modes: same files, dtype and prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from engine.config import model_folder
from engine.errors import ConfigError
from engine.lab.bench.offline import OtherArm, Session
from engine.lab.comparison.workload import Arm
from engine.model.checkpoint import quietly
from engine.model.loaded import LoadedModel
from engine.model.pair import Pair

# Plain generation; assisted by the draft with K chosen by transformers; assisted with K = 4.
NAMES = ("transformers", "assisted", "assisted-4")


def other_arms(pair: Pair, arms: Sequence[Arm], target: str, draft: str) -> dict[Arm, OtherArm]:
    """Return session factories for the arms among NAMES. `target`, `draft`: as on the command line.
    Raises EngineError."""
    found: dict[Arm, OtherArm] = {}
    for arm in arms:
        if arm.name not in NAMES:
            continue
        options: dict[str, Any] = {}
        if arm.name != "transformers":
            if pair.draft is None or pair.draft.borrows or pair.translation is not None:
                what = "needs a draft model with the target's tokenizer: leave it out of --modes"
                raise ConfigError(f"{arm.name} {what}")
            assistant = load_plain(model_folder(draft, "draft"), pair.draft)
            options["assistant_model"] = assistant
            if arm.name == "assisted-4":
                assistant.generation_config.num_assistant_tokens = 4
                assistant.generation_config.num_assistant_tokens_schedule = "constant"
                assistant.generation_config.assistant_confidence_threshold = 0
        model = load_plain(model_folder(target, "target"), pair.target)
        found[arm] = partial(TransformersSession, model=model, options=options)
    return found


def load_plain(folder: str, like: LoadedModel) -> Any:
    """Load a model with transformers, without EOS so that replies reach their full length."""
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    with quietly():
        model = auto.from_pretrained(folder, dtype=like.dtype).to(like.device).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


@dataclass(kw_only=True)
class TransformersSession(Session):
    """Runs `generate`, one request after the other. Prefill time counts in a `whole` run only: in
    others our prompts are in the prefix cache, which transformers lacks. Is its own streamer."""

    model: Any
    options: Mapping[str, Any]

    @property
    def is_over(self) -> bool:
        return not self.left[0]

    def step(self) -> None:
        """Generate one reply."""
        submit, _ = self.begin(0)
        self._submitted_at, self._has_prompt = self.clock(), False
        torch.manual_seed(submit.params.seed)
        sampling: dict[str, Any] = {"do_sample": False}
        if temperature := submit.params.temperature:
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        ids = torch.tensor([submit.prompt], device=self.model.device)
        with torch.inference_mode():
            self.model.generate(
                ids, attention_mask=torch.ones_like(ids), streamer=self, eos_token_id=None,
                max_new_tokens=submit.params.max_tokens, **sampling, **self.options,
            )  # fmt: skip

    def put(self, ids: torch.Tensor) -> None:
        """Receive the prompt, then each step's tokens (streamer interface)."""
        if not self._has_prompt:
            self._has_prompt = True
            return
        reply = self.run.replies[-1]
        if not reply.arrivals and not self.whole:
            self.clock.rewind(self._submitted_at)
        self.deliver(reply, ids.numel(), self.seconds)

    def end(self) -> None:
        """Do nothing at the end (streamer interface)."""
