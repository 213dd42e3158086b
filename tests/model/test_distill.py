"""What the built-in draft learns from: text that the target writes, and the distance from it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from engine.demo.distill import Lessons, distance, found, keep, run
from engine.demo.measure import agreement
from engine.demo.writer import CROWD, Writer
from engine.errors import ConfigError
from engine.messages import SamplingParams
from tests.support.reference import Reference


def lessons(wanted: torch.Tensor, likeliest: int) -> Lessons:
    """Logits of a target as what it is asked about."""
    found = wanted.log_softmax(-1).topk(likeliest)
    return Lessons(torch.zeros(1), found.indices.to(torch.int16), found.values)


@pytest.fixture
def pair() -> tuple[torch.Tensor, torch.Tensor]:
    target, draft = torch.randn(2, 3, 40, 50, generator=torch.Generator().manual_seed(0))
    return 2 * target, target + draft


def test_asked_about_every_token_the_distance_is_what_would_be_refused_and_some_divergence(
    pair: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Law: what is minimized is what the best exact rule would refuse, as measure.py has it."""
    target, draft = (part.flatten(0, 1) for part in pair)
    refused = 1 - agreement(target, draft, 1.0).rejection
    goal, guess = target.log_softmax(-1), draft.log_softmax(-1)
    divergence = F.kl_div(guess, goal, reduction="batchmean", log_target=True).item()
    found = distance(pair[1], lessons(pair[0], 50)).item()
    assert found == pytest.approx(refused + 0.3 * divergence, abs=1e-3)


def test_the_tokens_that_the_target_was_not_asked_about_count_as_one(
    pair: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """A draft that moves its odds among those is no further away; one that moves them to the
    likely ones is."""
    target = pair[0]
    told = lessons(target, 10)
    same = distance(target, told)
    assert same.item() == pytest.approx(0, abs=1e-5)
    unlikely = torch.ones_like(target).scatter(-1, told.ids.long(), 0.0).bool()
    among = torch.where(unlikely, target.flip(-1), target)
    rest = torch.where(unlikely, among, -torch.inf).logsumexp(-1, keepdim=True)
    before = torch.where(unlikely, target, -torch.inf).logsumexp(-1, keepdim=True)
    moved = torch.where(unlikely, among + before - rest, target)
    assert distance(moved, told).item() == pytest.approx(0, abs=1e-5)
    assert distance(torch.where(unlikely, target - 1, target), told).item() > 0.01


def test_a_crowd_writes_what_each_prompt_alone_is_continued_with(tiny_target: str) -> None:
    """More prompts than places, of different lengths: each row is its prompt and what the target
    says after it, to one length and past ends of documents."""
    prompts = [[1 + i % 100, *range(1, 2 + i % 7)] for i in range(CROWD + 9)]
    rows = list(Writer(Path(tiny_target), seed=0).rows(((p, 0.0) for p in prompts), 24))
    assert len(rows) == len(prompts)
    assert {len(row) for row in rows} == {24}
    reference = Reference(tiny_target, [])
    for prompt in prompts[:3]:
        params = SamplingParams(seed=0, max_tokens=24 - len(prompt), temperature=0.0)
        text, _ = reference.generate(prompt, params)
        assert prompt + text in rows


def test_what_was_kept_is_found_again(tmp_path: Path) -> None:
    """Law: a second run learns from the rows and judgements of the first, to the bit."""
    rows = torch.arange(6, dtype=torch.int16).view(2, 3)
    ids, scores = rows[:, :2, None].clone(), torch.randn(2, 2, 1).half()
    lessons = Lessons(rows, ids, scores), Lessons(rows + 1, ids + 1, -scores)
    keep(tmp_path / "kept", lessons)
    again = found(tmp_path / "kept")
    pairs = zip(lessons, again, strict=True)
    assert all(torch.equal(a, b) for pair in pairs for a, b in zip(*pair, strict=True))


@pytest.mark.parametrize("text", [b"", b"junk", b"\x02\0\0\0\0\0\0\0{}"])
def test_a_file_that_no_run_kept_is_refused(tmp_path: Path, text: bytes) -> None:
    """It is said in a sentence, not in what a parser stumbled over."""
    (tmp_path / "kept").write_bytes(text)
    with pytest.raises(ConfigError, match="holds no text that an earlier run kept"):
        found(tmp_path / "kept")


def test_a_folder_that_is_missing_is_said_before_anything_is_written(tmp_path: Path) -> None:
    """Not after minutes of work that nothing then holds."""
    with pytest.raises(ConfigError, match="there is no folder"):
        run(tmp_path, 1.0, seed=0, threads=torch.get_num_threads(), kept=tmp_path / "no" / "kept")
