"""`make bench`: what speculation gains on this machine, in one run, with transformers beside it.

Prints a card for people and, as the last line, one JSON object; progress goes to stderr. Exit
code 1 if speculation changed a single token, 2 if the pair cannot be loaded.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from statistics import mean
from typing import Any, Literal

import torch

from engine.arguments import Parser, exit_code, whole
from engine.config import model_folder
from engine.lab.bench.machine.found import KS, measure
from engine.lab.bench.machine.found import card as machine_card
from engine.lab.bench.options import add_pair, pair_config, set_threads
from engine.lab.bench.seconds import add_clock, clock_of, told
from engine.lab.bench.suite.contenders import (
    LONGEST_PROMPT,
    Contender,
    EngineContender,
    TransformersContender,
    load_plain,
)
from engine.lab.bench.suite.json_replies import json_tasks, structured
from engine.lab.bench.suite.measures import concurrency, overhead, progress, race
from engine.lab.bench.suite.prediction import prediction
from engine.lab.bench.suite.reading import Reply, reading_lines, reading_of
from engine.lab.bench.suite.result import (
    ADAPTIVE,
    CONCURRENT,
    HF_ASSISTED,
    HF_PLAIN,
    HF_TUNED,
    K_MAX,
    PLAIN,
    QUICK,
    Result,
    Size,
    card,
    json_lines,
    prediction_lines,
    rate_lines,
)
from engine.lab.bench.suite.served import measure_served
from engine.model.pair import Pair, load_pair


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0; 1 when a text differed; 2 when the pair cannot be loaded."""
    parsed = build_parser().parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    return exit_code("foredraft bench suite", lambda: run(parsed))


def build_parser() -> Parser:
    parser = Parser(prog="foredraft bench suite", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="less of everything, about a minute")
    parser.add_argument(
        "--only", choices=["json", "prediction", "transformers"],
        help="one part, and its lines of the card alone; transformers: code and prose, T=0 and T=1",
    )  # fmt: skip
    parser.add_argument(
        "--tokens", type=whole(16, 4096), metavar="N",
        help=f"of each reply ({Size.tokens}; {QUICK.tokens} with --quick)",
    )  # fmt: skip
    add_pair(parser)
    add_clock(parser)
    return parser


def run(parsed: argparse.Namespace) -> int:
    """Measure and print; the exit code. Raises EngineError."""
    size = replace(QUICK if parsed.quick else Size(), clock=clock_of(parsed))
    size = replace(size, tokens=parsed.tokens or size.tokens)
    set_threads(parsed.threads)
    if parsed.only is not None:
        return alone(parsed, size)
    result = everything(parsed, size)
    print(card(result))
    print(result.as_json())
    return 0 if result.lossless else 1


def everything(parsed: argparse.Namespace, size: Size) -> Result:
    """The whole benchmark. Raises EngineError."""
    pair = load_pair(pair_config(parsed))
    prompts = held_out_prompts(model_folder(parsed.target, "target"), CONCURRENT)
    contenders = build_contenders(parsed, pair, size)
    result = Result(facts=facts(parsed, pair, size, prompts))
    race(contenders, prompts[: size.prompts], size, result)
    overhead(pair, prompts, size, result)
    structured(pair, json_tasks(parsed.target, size.json_replies), size, result)
    concurrency(pair, prompts, size, result)
    prediction(pair, prompts[: size.prompts], size, result)
    machine(parsed, pair, size, result)
    progress("the same over HTTP, from a fresh start")
    served = measure_served(parsed.target, parsed.draft, prompts, tokens=size.concurrent_tokens)
    result.served = asdict(served)
    return result


def machine(parsed: argparse.Namespace, pair: Pair, size: Size, result: Result) -> None:
    """What forwards cost here, and the speed that these costs promise."""
    progress("what verification and drafting cost")
    config = pair_config(parsed, controller={"kind": "fixed", "k": max(KS)})
    found = measure(
        config, pair, rounds=size.rounds + 1, prompts=2, tokens=size.tokens // 4, clock=size.clock
    )
    result.machine, result.machine_lines = found.as_dict(), list(machine_card(found, pair))


def alone(parsed: argparse.Namespace, size: Size) -> int:
    """One part and nothing else; the exit code. Raises EngineError."""
    result, pair = Result(facts={}), load_pair(pair_config(parsed))
    lines: Iterable[str]
    if parsed.only == "json":
        structured(pair, json_tasks(parsed.target, size.json_replies), size, result)
        lines = json_lines(result)
    elif parsed.only == "transformers":
        lines = beside_transformers(parsed, pair, replace(size, temperatures=(0.0, 1.0)), result)
    else:
        prompts = held_out_prompts(model_folder(parsed.target, "target"), size.prompts)
        prediction(pair, prompts, size, result)
        lines = prediction_lines(result)
    print("\n".join(lines))
    print(f"texts equal to K=0: {result.texts_equal} of {result.texts_compared}")
    return 0 if result.lossless else 1


def beside_transformers(
    parsed: argparse.Namespace, pair: Pair, size: Size, sums: Result
) -> list[str]:
    """The race for code and for prose; texts are counted in `sums`."""
    contenders = build_contenders(parsed, pair, size)
    lines = []
    kinds: tuple[Literal["code", "prose"], ...] = ("code", "prose")
    for kind in kinds:
        progress(kind)
        prompts = held_out_prompts(model_folder(parsed.target, "target"), size.prompts, kind)
        part = Result(facts={})
        race(contenders, prompts, size, part)
        lines += [f"{kind}, {size.prompts} replies of {size.tokens} tokens", *rate_lines(part)]
        reply = Reply(size.tokens, mean(map(len, prompts)))
        lines += reading_lines(part, reading_of(pair, size.clock), reply)
        sums.texts_compared += part.texts_compared
        sums.texts_equal += part.texts_equal
    return lines


def held_out_prompts(
    folder: str, count: int, kind: Literal["code", "prose"] = "code"
) -> list[list[int]]:
    """Text that the built-in pair has not seen, as ids of this target's tokenizer."""
    from transformers import AutoTokenizer

    from engine.demo.corpus import heldout_prompts

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    texts = heldout_prompts(kind, count)
    return [tokenizer.encode(text, add_special_tokens=False)[:LONGEST_PROMPT] for text in texts]


def build_contenders(parsed: argparse.Namespace, pair: Pair, size: Size) -> list[Contender]:
    """K = 0, every K, adaptive, and transformers three times."""
    said: dict[str, dict[str, Any]] = {PLAIN: {"proposer": {"kind": "none"}}}
    said |= {f"K={k}": {"controller": {"k": k}} for k in size.ks}
    said[ADAPTIVE] = {"controller": {"k_max": K_MAX}}
    ours: list[Contender] = [
        EngineContender(name, speculation, pair=pair, tokens=size.tokens, clock=size.clock)
        for name, speculation in said.items()
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
    theirs: list[Contender] = [
        TransformersContender(
            name, model=model, assistant=helper, tokens=size.tokens, clock=size.clock
        )
        for name, helper in ((HF_PLAIN, None), (HF_ASSISTED, assistant), (HF_TUNED, tuned))
    ]
    return ours + theirs


def facts(
    parsed: argparse.Namespace, pair: Pair, size: Size, prompts: list[list[int]]
) -> dict[str, Any]:
    import transformers

    lengths = sorted(map(len, prompts[: size.prompts]))
    return {
        "target": parsed.target,
        "draft": parsed.draft,
        "dtype": pair.target.dtype_name,
        "device": pair.target.device_name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "prompts": size.prompts,
        "prompt_tokens": [lengths[0], lengths[-1]],
        "tokens": size.tokens,
        "rounds": size.rounds,
        "seconds": told(size.clock),
    }


if __name__ == "__main__":
    sys.exit(main())
