"""JSON replies under a schema: what the grammar and the draft model make of them together.

The tasks are the built-in chat model's own kind: facts about a person told in a sentence that it
has not seen, asked for as JSON, with the schema that a user would write for exactly these fields.
Every contender is held to the schema; K = 0 is plain decoding under it. Rates count the tokens of
the replies, which end where the schema is satisfied, and include prompts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from engine.config import model_folder
from engine.lab.bench.suite.contenders import EngineContender
from engine.lab.bench.suite.measures import progress
from engine.lab.bench.suite.result import ADAPTIVE, PLAIN, SEED, TEMPERATURES, Result, Size
from engine.messages import Grammar
from engine.model.pair import Pair

LONGEST_REPLY = 160  # tokens
NO_MODEL = "n-gram and grammar"
_KINDS: dict[type, str] = {str: "string", int: "integer", float: "number"}


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt and the schema of its reply."""

    prompt: list[int]
    grammar: Grammar


def json_tasks(target: str, count: int) -> list[Task]:
    """Held-out dialogues that end in JSON, as prompts for this target's tokenizer."""
    from transformers import AutoTokenizer

    from engine.demo.corpus import heldout_dialogues, render

    tokenizer: Any = AutoTokenizer.from_pretrained(model_folder(target, "target"))
    tasks = []
    for dialogue in heldout_dialogues("json", count):
        wanted = json.loads(dialogue[-1]["content"])
        text = render(dialogue[:-1]) + "<|im_start|>assistant\n"
        ids = tokenizer.encode(text, add_special_tokens=False)
        tasks.append(Task(ids, Grammar("json_schema", json.dumps(schema_of(wanted)))))
    return tasks


def schema_of(value: Any) -> dict[str, Any]:
    """The schema that a user would write for such a value: names and kinds, nothing else."""
    if isinstance(value, dict):
        return {
            "type": "object",
            "properties": {name: schema_of(part) for name, part in value.items()},
            "required": list(value),
            "additionalProperties": False,
        }
    if isinstance(value, list):
        items = schema_of(value[0])
        return {"type": "array", "items": items, "minItems": len(value), "maxItems": len(value)}
    return {"type": _KINDS[type(value)]}


def structured(pair: Pair, tasks: Sequence[Task], size: Size, result: Result) -> None:
    """Fills `json_rates`, `json_ratios` and whether texts agree."""
    said: dict[str, dict[str, Any]] = {
        PLAIN: {"proposer": {"kind": "none"}},
        NO_MODEL: {"proposer": {"kind": "ngram"}},
        ADAPTIVE: {},
    }
    contenders = [
        EngineContender(name, speculation, pair=pair, tokens=LONGEST_REPLY, clock=size.clock)
        for name, speculation in said.items()
    ]
    for temperature in TEMPERATURES:
        seconds: dict[str, list[float]] = {name: [] for name in said}
        texts: dict[str, list[list[int]]] = {}
        progress(f"JSON under a schema, T={temperature:g}")
        for round_ in range(size.rounds + 1):  # the first one is warm-up: grammars are compiled
            for contender in contenders:
                texts[contender.name], spent = _all(contender, tasks, temperature)
                if round_:
                    seconds[contender.name].append(spent)
        tokens = sum(map(len, texts[PLAIN]))
        for name, times in seconds.items():
            paired = zip(seconds[PLAIN], times, strict=True)
            result.json_rates.setdefault(name, {})[temperature] = median(tokens / s for s in times)
            ratio = median(base / mine for base, mine in paired)
            result.json_ratios.setdefault(name, {})[temperature] = ratio
            if name != PLAIN:
                pairs = zip(texts[PLAIN], texts[name], strict=True)
                result.texts_compared += len(tasks)
                result.texts_equal += sum(a == b for a, b in pairs)


def _all(
    contender: EngineContender, tasks: Sequence[Task], temperature: float
) -> tuple[list[list[int]], float]:
    """One reply after the other."""
    replies, total = [], 0.0
    for i, task in enumerate(tasks):
        reply, seconds = contender.run(
            task.prompt, temperature=temperature, seed=SEED + i, grammar=task.grammar
        )
        replies.append(reply)
        total += seconds
    return replies, total
