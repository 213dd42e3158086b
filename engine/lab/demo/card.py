"""`python -m engine.lab.demo.card`: prints the tables of the model card (README.md): how often the
draft agrees with the target on held-out text, how accurate the Medusa heads are there, and what
share of small tasks the target solves.

Agreement is how often the draft's token equals the target's, under three couplings:

- matched: both models add the same Gumbel noise to their log-probabilities and take the largest.
  This is the engine's rule, exact at any temperature.
- rejection: rejection sampling, the best that any exact rule can do: 1 - the total variation
  distance between the two distributions.
- greedy: the draft always proposes its most likely token, and the target samples.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoTokenizer

from engine.arguments import Parser, exit_code, whole
from engine.demo.chat import HERE
from engine.demo.tokens import heldout_rows
from engine.grammar.vocabulary import load_vocabulary
from engine.lab.demo import skills
from engine.lab.demo.model import check, load
from engine.lab.train.data import Rows
from engine.lab.train.learning import logits
from engine.lab.train.medusa import TOP, accuracy
from engine.model.medusa_heads import MedusaHeads, load_heads

TEMPERATURES = (0.0, 0.7, 1.0)


@dataclass(frozen=True)
class Agreement:
    """Fractions of positions, 0 to 1, where draft and target agree."""

    matched: float
    rejection: float
    greedy: float


def agreement(target: Tensor, draft: Tensor, temperature: float, seed: int = 0) -> Agreement:
    """Return the agreement of two sets of logits over the same positions."""
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
    """Return one record per temperature and kind of text; `texts`: kind to `[rows, length + 1]`
    ids. Losses are in nats per token."""
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


def heads_report(target: Any, heads: MedusaHeads, texts: dict[str, Tensor]) -> list[dict[str, str]]:
    """Return one record per kind of text: for each head, how often the right token is its most
    likely one, and how often it is among its `TOP` most likely ones."""
    records = list[dict[str, str]]()
    for kind, rows in texts.items():
        found = accuracy(target, heads, Rows(rows, torch.ones_like(rows, dtype=torch.bool)))
        by_head = {f"head {n}": f"{a:.3f} / {b:.3f}" for n, (a, b) in enumerate(found, 1)}
        records.append({"text": kind, **by_head})
    return records


def show(records: Sequence[Mapping[str, str | float]]) -> None:
    """Print records as a Markdown table."""
    print("| " + " | ".join(records[0]) + " |")
    print("|---" * len(records[0]) + "|")
    for record in records:
        figures = ((key != "T" and isinstance(x, float), x) for key, x in record.items())
        print("| " + " | ".join(f"{x:.3f}" if share else str(x) for share, x in figures) + " |")


def measure(folder: Path, options: Namespace) -> int:
    """Print the tables and return the exit code. Raises ConfigError for a folder without a pair."""
    check(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    target, draft = (load(folder / name) for name in ("target", "draft"))
    if options.rows:
        texts = heldout_rows(tokenizer, options.rows, options.length)
        show(report(target, draft, texts, TEMPERATURES))
        if (path := folder / "medusa").is_dir():
            heads = load_heads(str(path), path, target.get_output_embeddings().weight)
            print(f"\nMedusa heads: top-1 / top-{TOP} accuracy")
            show(heads_report(target, heads, texts))
    if options.tasks:
        vocabulary = load_vocabulary(str(folder / "target"), eos_ids=skills.ENDS)
        records, wrong = skills.report(target, tokenizer, vocabulary, options.tasks, options.wrong)
        print("\nTasks, target alone, greedy")
        show(records)
        print("\n".join(wrong))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = Parser("python -m engine.lab.demo.card", __doc__)
    add = parser.add_argument
    add("--folder", type=Path, default=HERE, help="folder with target/ and draft/")
    add("--rows", type=whole(0, 1000), default=16, help="rows per kind of text (16; 0: none)")
    add("--length", type=whole(1, 2048), default=512, help="tokens of a row (default 512)")
    add("--tasks", type=whole(0, 1000), default=32, help="tasks per skill (32; 0: none)")
    add("--wrong", type=whole(0, 1000), default=0, help="wrong replies to show per skill (0)")
    options = parser.parse_args(arguments)
    return exit_code(parser.prog, lambda: measure(options.folder, options))


if __name__ == "__main__":
    raise SystemExit(main())
