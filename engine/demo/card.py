"""Prints the figures and replies that the model card (README.md) states.

python -m engine.demo.card --measure    losses and agreement on held-out text
python -m engine.demo.card --time       one-row forward times of both models, one thread
python -m engine.demo.card --replies    the documented prompts and what the target answers at T=0

Agreement is how often the draft's token is the target's, under three couplings:

- matched: both models add the same Gumbel noise to their log-probabilities and take the largest.
  It is the engine's rule, exact at any temperature.
- rejection: the best that any exact rule can do, 1 - total variation distance between the two
  distributions.
- greedy: the draft always offers its likeliest token, and the target samples.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoTokenizer

from engine.arguments import Parser, exit_code, whole
from engine.demo.model import check, load, logits
from engine.demo.tokens import heldout_rows

HERE = Path(__file__).parent
PROMPTS = HERE / "prompts.json"
LENGTH = {"chat": 96, "code": 48}  # tokens of a reply
TEMPERATURES = (0.0, 0.7, 1.0)


@dataclass(frozen=True)
class Agreement:
    """Shares of positions, 0 to 1."""

    matched: float
    rejection: float
    greedy: float


def agreement(target: Tensor, draft: Tensor, temperature: float, seed: int = 0) -> Agreement:
    """Agreement of two sets of logits over the same positions."""
    if temperature == 0:
        same = (target.argmax(-1) == draft.argmax(-1)).float().mean().item()
        return Agreement(same, same, same)
    wanted = (target.float() / temperature).log_softmax(-1)
    offered = (draft.float() / temperature).log_softmax(-1)
    generator = torch.Generator().manual_seed(seed)
    noise = -torch.empty_like(wanted).exponential_(generator=generator).log()
    matched = ((wanted + noise).argmax(-1) == (offered + noise).argmax(-1)).float().mean().item()
    rejection = torch.minimum(wanted.exp(), offered.exp()).sum(-1).mean().item()
    greedy = wanted.gather(-1, draft.argmax(-1, keepdim=True)).exp().mean().item()
    return Agreement(matched, rejection, greedy)


@torch.no_grad()
def report(
    target: Any, draft: Any, texts: dict[str, Tensor], temperatures: Iterable[float]
) -> list[dict[str, str | float]]:
    """One record per kind of text, `[rows, length + 1]` ids, and temperature; losses are nats per
    token."""
    records: list[dict[str, str | float]] = []
    for kind, rows in texts.items():
        both = [
            torch.cat([logits(model, row[None, :-1]) for row in rows]) for model in (target, draft)
        ]
        labels = rows[:, 1:].flatten()
        target_loss, draft_loss = (round(F.cross_entropy(of, labels).item(), 3) for of in both)
        for temperature in temperatures:
            shares = asdict(agreement(both[0], both[1], temperature))
            records.append({
                "text": kind, "T": temperature, "target loss": target_loss,
                "draft loss": draft_loss, **{name: round(x, 3) for name, x in shares.items()},
            })  # fmt: skip
    return records


def measure(folder: Path, rows: int, length: int) -> None:
    """A table of held-out text."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    target, draft = (load(folder / name) for name in ("target", "draft"))
    records = report(target, draft, heldout_rows(tokenizer, rows, length), TEMPERATURES)
    print("| " + " | ".join(records[0]) + " |")
    print("|---" * len(records[0]) + "|")
    for text, temperature, *figures in (record.values() for record in records):
        print(f"| {text} | {temperature} | " + " | ".join(f"{x:.3f}" for x in figures) + " |")


@torch.no_grad()
def forward_time(folder: Path, context: int = 64, repeats: int = 200) -> float:
    """Milliseconds of the fastest cached decoding step through transformers.

    On a shared machine the long step is interrupted more often than the short one, so that a
    median would flatter the ratio.
    """
    model = load(folder, torch.bfloat16)
    cache = model(torch.arange(5, 5 + context)[None], use_cache=True).past_key_values
    token, times = torch.tensor([[50]]), []
    for _ in range(repeats):
        start = time.perf_counter()
        cache = model(token, past_key_values=cache, use_cache=True).past_key_values
        times.append(1000 * (time.perf_counter() - start))
    return min(times)


def documented() -> list[dict[str, str]]:
    """The card's prompts, `code` to complete or `chat` to answer, each with the `reply` of the
    committed weights."""
    prompts: list[dict[str, str]] = json.loads(PROMPTS.read_text("utf-8"))
    return prompts


def replies(folder: Path, prompts: Iterable[dict[str, str]]) -> list[dict[str, str]]:
    """The prompts with what the target in `folder` says to them at T=0."""
    model, tokenizer = load(folder / "target"), AutoTokenizer.from_pretrained(folder / "target")
    found = []
    for prompt in prompts:
        kind = "code" if "code" in prompt else "chat"
        text: Any = prompt[kind]
        if kind == "chat":
            turns = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        given = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
        output = model.generate(**given, max_new_tokens=LENGTH[kind], do_sample=False)
        reply = tokenizer.decode(output[0, given.input_ids.shape[1] :], skip_special_tokens=True)
        found.append({kind: prompt[kind], "reply": str(reply)})
    return found


def build_parser() -> Parser:
    description = (__doc__ or "").split("\n", 1)[0]
    parser = Parser(prog="python -m engine.demo.card", description=description)
    add = parser.add_argument
    add("--folder", type=Path, default=HERE, help="folder that holds target/ and draft/")
    add("--measure", action="store_true", help="losses and agreement on held-out text")
    add("--rows", type=whole(1, 1000), default=16, help="rows per kind of text (default 16)")
    add("--length", type=whole(1, 2048), default=512, help="tokens of a row (default 512)")
    add("--time", action="store_true", help="one-row forward times on one thread")
    add("--replies", action="store_true",
        help="the documented prompts, answered at T=0, as JSON")  # fmt: skip
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
    check(options.folder)
    if options.measure:
        measure(options.folder, options.rows, options.length)
    if options.time:
        torch.set_num_threads(1)
        slow, fast = (forward_time(options.folder / name) for name in ("target", "draft"))
        print(f"target {slow:.2f} ms, draft {fast:.2f} ms, ratio {fast / slow:.3f}")
    if options.replies:
        print(json.dumps(replies(options.folder, documented()), indent=2, ensure_ascii=False))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
