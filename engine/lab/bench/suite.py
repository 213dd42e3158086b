"""`make bench`: what speculation gains on this machine, in one run, with transformers beside it.

Prints a card for people and, as the last line, one JSON object; progress goes to stderr. Exit
code 1 if speculation changed a single token, 2 if the pair cannot be loaded.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from engine.arguments import Parser, whole
from engine.child.freeze import freeze_memory
from engine.config import model_folder
from engine.lab.bench.machine import KS, measure
from engine.lab.bench.machine import card as machine_card
from engine.lab.bench.options import (
    Clock,
    add_clock,
    add_pair,
    clock_name,
    clock_of,
    encoder,
    execute,
    pair_config,
    pair_facts,
    set_threads,
)
from engine.lab.bench.served import measure_served
from engine.lab.bench.suite_result import (
    ADAPTIVE,
    CONCURRENT,
    HF_ASSISTED,
    HF_PLAIN,
    HF_TUNED,
    NO_LOOKUP,
    PLAIN,
    PREDICTED,
    Result,
    card,
    part_lines,
)
from engine.lab.bench.turns import (
    LONGEST_PROMPT,
    SEED,
    EngineContender,
    Entrant,
    Task,
    Totals,
    TransformersContender,
    load_plain,
    race,
)
from engine.messages import Grammar
from engine.model.pair import Pair, load_pair

TEMPERATURES = (0.0, 0.8)
K_MAX = 8
LONGEST_JSON = 160  # tokens
NO_MODEL = "n-gram and grammar"
_KINDS: dict[type, str] = {str: "string", int: "integer", float: "number"}
_EVERY = 28  # tokens from one edit of a predicted file to the next
_EDIT = 6  # tokens of a deletion or an insertion


@dataclass(frozen=True)
class Size:
    """How much is run. Rates include the prompt, so replies are long: it is about decoding.
    `clock`: whose seconds count."""

    ks: tuple[int, ...] = (1, 2, 3, 4, 6, K_MAX)
    prompts: int = 4
    tokens: int = 256
    rounds: int = 2
    concurrent_tokens: int = 48
    json_replies: int = 12
    temperatures: tuple[float, ...] = TEMPERATURES
    clock: Clock = time.perf_counter


QUICK = Size(ks=(1, 2, 4, K_MAX), prompts=3, tokens=48, concurrent_tokens=24)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0; 1 when a text differed; 2 when the pair cannot be loaded."""
    return execute(build_parser(), run, arguments)


def build_parser() -> Parser:
    parser = Parser(prog="foredraft bench suite", description=__doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="less of everything, about a minute")
    add("--only", choices=["json", "prediction", "transformers"],
        help="one part, and its lines of the card alone; transformers: code and prose, T=0 and"
        " T=1")  # fmt: skip
    add("--tokens", type=whole(16, 4096), metavar="N",
        help=f"of each reply ({Size.tokens}; {QUICK.tokens} with --quick)")  # fmt: skip
    add_pair(parser)
    add_clock(parser)
    return parser


def run(parsed: argparse.Namespace) -> int:
    """Measure and print; the exit code. Raises EngineError."""
    size = replace(QUICK if parsed.quick else Size(), clock=clock_of(parsed))
    size = replace(size, tokens=parsed.tokens or size.tokens)
    set_threads(parsed.threads)
    pair = load_pair(pair_config(parsed))
    if parsed.only is None:
        result = everything(parsed, pair, size)
        print(card(result))
        print(result.as_json())
    else:
        result = alone(parsed, pair, size)
        print("\n".join(part_lines(result)))
    return 0 if result.lossless else 1


def everything(parsed: argparse.Namespace, pair: Pair, size: Size) -> Result:
    """The whole benchmark. Raises EngineError."""
    prompts = held_out_prompts(parsed.target, CONCURRENT)
    result = Result(facts=facts(pair, size, prompts))
    speed("code", parsed, pair, prompts[: size.prompts], size, result)
    overhead(pair, prompts, size, result)
    structured(pair, json_tasks(parsed.target, size.json_replies), size, result)
    concurrency(pair, prompts, size, result)
    prediction(pair, prompts[: size.prompts], size, result)
    progress("what verification and drafting cost")
    found = measure(
        pair_config(parsed, controller={"kind": "fixed", "k": max(KS)}), pair,
        rounds=size.rounds + 1, prompts=2, tokens=max(size.tokens // 4, max(KS) + 2),
        clock=size.clock,
    )  # fmt: skip
    result.machine, result.machine_lines = found.as_dict(), list(machine_card(found, pair))
    progress("the same over HTTP, from a fresh start")
    served = measure_served(parsed.target, parsed.draft, prompts, tokens=size.concurrent_tokens)
    result.served = asdict(served)
    return result


def alone(parsed: argparse.Namespace, pair: Pair, size: Size) -> Result:
    """One part and nothing else. Raises EngineError."""
    prompts = held_out_prompts(parsed.target, size.prompts)
    result = Result(facts=facts(pair, size, prompts))
    if parsed.only == "json":
        structured(pair, json_tasks(parsed.target, size.json_replies), size, result)
    elif parsed.only == "prediction":
        prediction(pair, prompts, size, result)
    else:
        size = replace(size, temperatures=(0.0, 1.0))
        speed("code", parsed, pair, prompts, size, result)
        prose = held_out_prompts(parsed.target, size.prompts, "prose")
        speed("prose", parsed, pair, prose, size, result)
    return result


def held_out_prompts(
    target: str, count: int, kind: Literal["code", "prose"] = "code"
) -> list[list[int]]:
    """Text that the built-in pair has not seen, as ids of this target's tokenizer."""
    from engine.demo.corpus import heldout_prompts

    encode = encoder(target)
    return [encode(text)[:LONGEST_PROMPT] for text in heldout_prompts(kind, count)]


def facts(pair: Pair, size: Size, prompts: list[list[int]]) -> dict[str, Any]:
    import transformers

    lengths = sorted(map(len, prompts[: size.prompts]))
    return {
        **pair_facts(pair),
        "transformers": transformers.__version__,
        "prompts": size.prompts,
        "prompt_tokens": [lengths[0], lengths[-1]],
        "tokens": size.tokens,
        "rounds": size.rounds,
        "seconds": clock_name(size.clock),
    }


def speed(
    part: str,
    parsed: argparse.Namespace,
    pair: Pair,
    prompts: list[list[int]],
    size: Size,
    result: Result,
) -> None:
    """K = 0, every K, adaptive, and transformers three times."""
    said: dict[str, dict[str, Any]] = {PLAIN: {"proposer": {"kind": "none"}}}
    said |= {f"K={k}": {"controller": {"k": k}} for k in size.ks}
    said[ADAPTIVE] = {"controller": {"k_max": K_MAX}}
    tasks = [Task([prompt]) for prompt in prompts]
    entrants = [
        Entrant(name, _ours(speculation, pair, size), tasks) for name, speculation in said.items()
    ]
    target, draft = pair.target, pair.draft
    assert draft is not None, "the configuration names a draft"
    model = load_plain(model_folder(parsed.target, "target"), target.dtype, target.device)
    assistant, tuned = (
        load_plain(model_folder(parsed.draft, "draft"), draft.dtype, draft.device) for _ in range(2)
    )
    tuned.generation_config.num_assistant_tokens = 4
    tuned.generation_config.num_assistant_tokens_schedule = "constant"
    tuned.generation_config.assistant_confidence_threshold = 0
    for name, helper in ((HF_PLAIN, None), (HF_ASSISTED, assistant), (HF_TUNED, tuned)):
        theirs = TransformersContender(
            model=model, assistant=helper, tokens=size.tokens, clock=size.clock
        )
        entrants.append(Entrant(name, theirs, tasks))
    progress(f"{part}, K by K and transformers")
    result.rows += race(part, entrants, temperatures=size.temperatures, rounds=size.rounds)


def _ours(
    speculation: dict[str, Any], pair: Pair, size: Size, *, tokens: int = 0, sequences: int = 1
) -> EngineContender:
    return EngineContender.of(
        speculation, pair=pair, tokens=tokens or size.tokens, sequences=sequences, clock=size.clock
    )


def overhead(pair: Pair, prompts: list[list[int]], size: Size, result: Result) -> None:
    """The share of a step outside forwards, with the default settings, at batch 1 and 8."""
    for batch in (1, 8):
        progress(f"host overhead, batch {batch}")
        ours = _ours({}, pair, size, sequences=batch)
        freeze_memory()  # as a server does
        entrants = [Entrant(f"batch {batch}", ours, [Task(prompts[:batch])])]
        result.rows += race("host", entrants, temperatures=TEMPERATURES, rounds=size.rounds)


def concurrency(pair: Pair, prompts: list[list[int]], size: Size, result: Result) -> None:
    """64 greedy streams at once against the same ones alone."""
    progress(f"{CONCURRENT} concurrent streams")
    tokens = size.concurrent_tokens
    at_once = _ours({}, pair, size, tokens=tokens, sequences=CONCURRENT)
    entrants = [
        Entrant("one by one", _ours({}, pair, size, tokens=tokens), [Task([p]) for p in prompts]),
        Entrant("at once", at_once, [Task(prompts)]),
    ]
    result.rows += race("streams", entrants, temperatures=[0.0], rounds=1, warm=False)


def json_tasks(target: str, count: int) -> list[Task]:
    """Facts about a person told in a sentence that the built-in chat model has not seen, asked for
    as JSON, with the schema that a user would write for exactly these fields."""
    from engine.demo.corpus import heldout_dialogues, render

    encode = encoder(target)
    tasks = []
    for dialogue in heldout_dialogues("json", count):
        wanted = json.loads(dialogue[-1]["content"])
        ids = encode(render(dialogue[:-1]) + "<|im_start|>assistant\n")
        tasks.append(Task([ids], grammar=Grammar("json_schema", json.dumps(schema_of(wanted)))))
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
    """JSON replies, which end where the schema is satisfied; K = 0 is plain decoding under it."""
    progress("JSON under a schema")
    said: dict[str, dict[str, Any]] = {
        PLAIN: {"proposer": {"kind": "none"}},
        NO_MODEL: {"proposer": {"kind": "ngram"}},
        ADAPTIVE: {},
    }
    entrants = []
    for name, speculation in said.items():
        ours = _ours(speculation, pair, size, tokens=LONGEST_JSON)
        for task in tasks:  # uncounted: grammars are compiled
            ours.run(task, Totals(), temperature=0.0, seed=SEED)
        entrants.append(Entrant(name, ours, tasks))
    result.rows += race("JSON", entrants, temperatures=TEMPERATURES, rounds=size.rounds)


def prediction(pair: Pair, prompts: list[list[int]], size: Size, result: Result) -> None:
    """What a prediction gains: a reply that the caller knows nearly, exactly, or not at all."""
    plain, ours = _ours({"proposer": {"kind": "none"}}, pair, size), _ours({}, pair, size)
    drafted = _ours({"companions": ["grammar", "prediction"]}, pair, size)
    tasks = [Task([prompt]) for prompt in prompts]
    right, old, other = PREDICTED
    for temperature in TEMPERATURES:
        progress(f"predictions, T={temperature:g}")
        replies = [
            plain.run(task, Totals(), temperature=temperature, seed=SEED + i).replies[0]
            for i, task in enumerate(tasks)
        ]
        predicted = {
            right: replies,
            old: [old_file(reply) for reply in replies],
            other: [*replies[1:], list(reversed(replies[0]))],
        }
        entrants = [Entrant(PLAIN, plain, tasks), Entrant(NO_LOOKUP, drafted, tasks)]
        entrants.append(Entrant(ADAPTIVE, ours, tasks))
        for name, said in predicted.items():
            known = [replace(t, prediction=p) for t, p in zip(tasks, said, strict=True)]
            entrants.append(Entrant(name, ours, known))
        result.rows += race("prediction", entrants, temperatures=[temperature], rounds=size.rounds)


def old_file(reply: Sequence[int]) -> list[int]:
    """The reply before its edits: an insertion, a deletion and a replacement in turn. So editing a
    file is measured without asking a small model to follow instructions."""
    old: list[int] = []
    for number, start in enumerate(range(0, len(reply), _EVERY)):
        piece = list(reply[start : start + _EVERY])
        if len(piece) == _EVERY:
            head, tail = piece[: _EVERY // 2], piece[_EVERY // 2 :]
            match number % 3:
                case 0:
                    piece = head + tail[_EDIT:]
                case 1:
                    piece = head + piece[-_EDIT:][::-1] + tail
                case _:
                    piece = [*head, tail[-1], *tail[1:]]
        old += piece
    return old


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
