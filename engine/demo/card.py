"""Prints the figures and replies that the model card (README.md) states.

python -m engine.demo.card --measure    losses and acceptance on held-out text
python -m engine.demo.card --time       one-row forward times of both models, one thread
python -m engine.demo.card --replies    the documented prompts and what the target answers at T=0
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from engine.arguments import Parser, exit_code, whole
from engine.demo import checkpoint
from engine.demo.checkpoint import settings
from engine.demo.measure import report
from engine.demo.rows import heldout_rows

HERE = Path(__file__).parent
PROMPTS = HERE / "prompts.json"
LENGTH = {"chat": 96, "code": 48}  # tokens of a reply
TEMPERATURES = (0.0, 0.7, 1.0)


def measure(folder: Path, rows: int, length: int) -> None:
    """One line per kind of text and temperature: the couplings of measure.py, as shares."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    pair = [checkpoint.load(folder / name, torch.float32) for name in ("target", "draft")]
    names = ("text", "T", "target loss", "draft loss", "matched", "rejection", "greedy draft")
    print("| " + " | ".join(names) + " |")
    print("|---" * len(names) + "|")
    for record in report(pair[0], pair[1], heldout_rows(tokenizer, rows, length), TEMPERATURES):
        values = (
            f"{value:.3f}" for key, value in record.items() if key not in ("text", "temperature")
        )
        print(f"| {record['text']} | {record['temperature']} | " + " | ".join(values) + " |")


@torch.no_grad()
def forward_time(folder: Path, context: int = 64, repeats: int = 200) -> float:
    """Milliseconds of the fastest cached decoding step through transformers.

    On a shared machine the long step is interrupted more often than the short one, so that a
    median would flatter the ratio.
    """
    model = checkpoint.plain(folder, torch.bfloat16)
    cache = model(torch.arange(5, 5 + context)[None], use_cache=True).past_key_values
    token, times = torch.tensor([[50]]), []
    for _ in range(repeats):
        start = time.perf_counter()
        cache = model(token, past_key_values=cache, use_cache=True).past_key_values
        times.append(1000 * (time.perf_counter() - start))
    return min(times)


def target(folder: Path) -> tuple[Any, Any]:
    """The target and its tokenizer, ready to reply."""
    model = checkpoint.plain(folder / "target", torch.float32)
    return model, AutoTokenizer.from_pretrained(folder / "target")


def reply(model: Any, tokenizer: Any, prompt: str | list[dict[str, str]], tokens: int = 96) -> str:
    """What the target says at T=0: text is completed, messages are answered."""
    text = prompt
    if not isinstance(prompt, str):
        text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, return_tensors="pt").input_ids
    ends = model.generation_config.eos_token_id
    how = settings(max_new_tokens=tokens, do_sample=False, eos_token_id=ends)
    output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=how)
    return str(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))


def documented() -> list[dict[str, str]]:
    """The card's prompts, each with the reply of the committed weights."""
    prompts: list[dict[str, str]] = json.loads(PROMPTS.read_text("utf-8"))
    return prompts


def answers(folder: Path) -> list[dict[str, str]]:
    """The documented prompts with the replies that the weights in `folder` give now."""
    found = []
    model, tokenizer = target(folder)
    for entry in documented():
        kind = "code" if "code" in entry else "chat"
        prompt = entry[kind]
        asked: str | list[dict[str, str]] = (
            prompt if kind == "code" else [{"role": "user", "content": prompt}]
        )
        found.append({kind: prompt, "reply": reply(model, tokenizer, asked, LENGTH[kind])})
    return found


def build_parser() -> Parser:
    parser = Parser(
        prog="python -m engine.demo.card", description=(__doc__ or "").split("\n", 1)[0]
    )
    parser.add_argument(
        "--folder", type=Path, default=HERE, help="folder that holds target/ and draft/"
    )
    parser.add_argument(
        "--measure", action="store_true", help="losses and acceptance on held-out text"
    )
    parser.add_argument(
        "--rows", type=whole(1, 1000), default=16, help="rows per kind of text (default 16)"
    )
    parser.add_argument(
        "--length", type=whole(1, 2048), default=512, help="tokens of a row (default 512)"
    )
    parser.add_argument("--time", action="store_true", help="one-row forward times on one thread")
    parser.add_argument(
        "--replies", action="store_true", help="the documented prompts, answered at T=0, as JSON"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code."""
    parser = build_parser()
    options = parser.parse_args(argv)
    if not (options.measure or options.time or options.replies):
        parser.error("ask for --measure, --time or --replies")
    return exit_code(parser.prog, lambda: run(options))


def run(options: argparse.Namespace) -> int:
    """Raises ConfigError for a folder without a pair."""
    checkpoint.check(options.folder)
    if options.measure:
        measure(options.folder, options.rows, options.length)
    if options.time:
        torch.set_num_threads(1)
        slow, fast = (forward_time(options.folder / name) for name in ("target", "draft"))
        print(f"target {slow:.2f} ms, draft {fast:.2f} ms, ratio {fast / slow:.3f}")
    if options.replies:
        print(json.dumps(answers(options.folder), indent=2, ensure_ascii=False))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
