"""A draft with a tokenizer of its own: the shared vocabulary, the map between positions, and texts
that stay the target's."""

from __future__ import annotations

import logging
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from engine.config import EngineConfig
from engine.core import Engine
from engine.errors import ModelError
from engine.grammar.translation import Translation
from engine.grammar.vocabulary import load_vocabulary
from engine.messages import Output, SamplingParams
from engine.model.fit import check_pair
from engine.model.pair import Pair, load_pair
from engine.scheduling.sequence import Sequence
from engine.speculation.drafts import MOST_ROWS
from engine.speculation.foreign_draft import DraftTokens, ForeignDraftProposer
from engine.speculation.proposal import Proposal
from tests.model import test_lossless as lossless
from tests.model.test_draft_model import decode, sequence
from tests.model.test_lossless import (
    FIELDS,
    PROMPT,
    VARIANTS,
    Replies,
    config_for,
    hold,
    run,
    submit_all,
)
from tests.support import tiny, tiny_text, two_tokenizers
from tests.support.reference import Reference


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return two_tokenizers.save(tmp_path_factory.mktemp("tongues"))


def config(paths: tuple[str, str], k: int | str, **more: Any) -> EngineConfig:
    controller: dict[str, Any] = (
        {"kind": "adaptive"} if k == "adaptive" else {"kind": "fixed", "k": k}
    )
    speculation: dict[str, Any] = {
        "proposer": {"path": paths[1]},
        "controller": controller,
        "companions": [],
    }
    settings: dict[str, Any] = {
        "target": {"path": paths[0]},
        "speculation": speculation,
        "device": "cpu",
    }
    cache = {"num_blocks": 512, **more.pop("cache", {})}
    return EngineConfig.model_validate({**settings, "cache": cache, **more})


@pytest.fixture(scope="module")
def pair(paths: tuple[str, str]) -> Pair:
    pair = load_pair(config(paths, 3))
    assert pair.translation is not None
    return pair


@pytest.fixture(scope="module")
def expected(paths: tuple[str, str]) -> dict[str, tuple[list[int], list[float]]]:
    reference = Reference(paths[0], tiny_text.EOS)
    return {name: reference.generate(PROMPT, params) for name, params in FIELDS.items()}


@pytest.mark.parametrize(
    "variant", ["whole prompts", "no prefix cache", "small blocks, preemption"]
)
@pytest.mark.parametrize("k", [1, 4, "adaptive"])
def test_lossless(
    k: int | str,
    variant: str,
    paths: tuple[str, str],
    pair: Pair,
    expected: dict[str, tuple[list[int], list[float]]],
) -> None:
    """Law: the text is the target's, greedy and sampled, however the draft tokenizes it; all KV
    blocks of the draft are freed."""
    engine = Engine(config(paths, k, **VARIANTS[variant]), pair=pair)
    proposer = engine._proposer._main
    assert isinstance(proposer, ForeignDraftProposer)
    free, counts = len(proposer._free), Counter[str]()
    for _ in range(2):  # the second time, prompts hit the prefix cache
        submit_all(engine, PROMPT, FIELDS)
        replies = Replies(run(engine, counts))
        hold(replies, expected)
    assert counts["preemptions"] or "preemption" not in variant
    assert (engine.gauges().blocks_used, len(proposer._free)) == (0, free)
    if k == 4:
        assert sum(output.accepted for output in replies.last.values()) > 0


@pytest.mark.parametrize("speculation", [{}, {"companions": []}], ids=["cascade", "alone"])
def test_copies_of_one_prompt(
    speculation: dict[str, object], paths: tuple[str, str], pair: Pair
) -> None:
    """Law: as for other drafts, though the draft shares no blocks among copies."""

    def build(drafter: str, k: int | str, variant: lossless.Variant) -> Engine:
        return Engine(config_for(*paths, drafter, k, variant), pair=pair)

    reference = Reference(paths[0], tiny_text.EOS)
    lossless.test_copies_of_one_prompt("foreign", speculation, build, reference)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_permuted_ids_agree_as_often(temperature: float, tmp_path: Path) -> None:
    """Law: on texts of shared tokens only, a draft with permuted ids has the same draft tokens
    accepted, since noise is keyed by target ids. At temperature 1, noise keyed by the draft's ids
    would make hardly any draft token right."""
    target, draft = two_tokenizers.save(tmp_path, tiny_text.MERGES)
    own = tiny_text.save(tiny.draft_of(tiny_text.target()), tmp_path / "own")
    outside = [*range(1, len(tiny_text.SPECIALS)), *range(276, 289)]
    kept = []
    for path in (draft, own):
        engine = Engine(config((target, path), 3))
        for i in range(6):
            params = SamplingParams(
                seed=i, max_tokens=40, temperature=temperature, ignore_eos=True,
                logit_bias=dict.fromkeys(outside, -100.0),
            )  # fmt: skip
            submit_all(engine, [*PROMPT, 20 + i], {str(i): params})
        kept.append(rate(list(Replies(run(engine)).last.values())))
    assert kept[0] == pytest.approx(kept[1], abs=0.02)
    assert kept[1] > 0.1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_committed_tokens_are_compared_in_hindsight(
    temperature: float, paths: tuple[str, str], pair: Pair
) -> None:
    """Law: each position that the draft computes late shows whether a draft without any history
    would have proposed its token, also after tokens of several pieces or none; a prompt is not
    compared, nor a position twice, nor more positions than the rows allow."""
    proposer = Engine(config(paths, 1), pair=pair)._proposer._main
    assert isinstance(proposer, ForeignDraftProposer)
    proposer._compares = lambda: True
    rng, names, hits = random.Random(5), tiny_text.tokenizer(), list[bool]()
    several = [id_of(names, text) for text in ("true", "Ġ[", "name")]
    no_text = tiny_text.vocab_size() - 1

    def drawn(seq: Sequence, end: int) -> list[int]:
        copy = Sequence("copy", seq.params, seq.tokens[:end], end)
        [proposal] = proposer.propose([decode(copy, 1)])
        proposer.forget(copy)
        return proposal.tokens

    seqs = [sequence(str(i), [*PROMPT, 20 + i], temperature=temperature) for i in range(3)]
    next_of, last = [seq.num_prompt for seq in seqs], [Proposal()] * 3
    for spell in (9, 1, 4, 40):
        for i, seq in enumerate(seqs):
            seq.number = i
            for count in range(spell + i):
                other = rng.choice([*several, rng.randrange(270), *[no_text] * (count > 1)])
                seq.tokens += drawn(seq, seq.num_tokens) if rng.random() < 0.5 else [other]
            # The first of two draft tokens was run: if it is right, so was the token after it.
            next_of[i] += bool(last[i]) and seq.tokens[next_of[i] - 1 :][:1] == last[i].tokens[:1]
        last = proposer.propose([decode(seq, 2) for seq in seqs])
        found = {each.request: each for each in proposer.agreements}
        for i, seq in enumerate(seqs):
            compared = found[i].hits if i in found else []
            first = seq.num_tokens - len(compared)
            assert first == next_of[i] or (
                spell == 40 and next_of[i] < first and len(compared) <= MOST_ROWS
            )
            assert i not in found or found[i].position + seq.num_prompt == first
            for at, hit in enumerate(compared, first):
                assert hit == (drawn(seq, at) == [seq.tokens[at]])
            hits += compared
            next_of[i] = seq.num_tokens + 1
    assert 0 < sum(hits) < len(hits)


def id_of(tokenizer: Tokenizer, text: str) -> int:
    found = tokenizer.token_to_id(text)
    assert found is not None
    return found


def rate(ends: list[Output]) -> float:
    return sum(end.accepted for end in ends) / sum(end.proposed for end in ends)


def test_tokens_outside_the_intersection_are_written_in_pieces(pair: Pair) -> None:
    """Law: a shared token maps to one token, a token of the target alone to its text in draft
    tokens, EOS tokens map to each other, and padding maps to nothing."""
    translation = pair.translation
    assert translation is not None
    ours, theirs = tiny_text.tokenizer(), two_tokenizers.tokenizer()
    both = dict(zip(translation.target_ids, translation.draft_ids, strict=True))
    assert len(both) == len(translation.draft_ids) == 255 + len(two_tokenizers.MERGES) + 1
    for text in ("ab", "a", "Ġ", "Ċ", '{"'):
        assert both[id_of(ours, text)] == id_of(theirs, text)
        assert translation.pieces(id_of(ours, text)) == [id_of(theirs, text)]
    assert theirs.decode(translation.pieces(id_of(ours, "true"))) == "true"
    assert len(translation.pieces(id_of(ours, "true"))) > 1
    name = translation.pieces(id_of(ours, "<tool_call>"))
    assert theirs.decode(name) == "<tool_call>"
    assert translation.pieces(0) == [id_of(theirs, "</s>")]
    assert translation.pieces(tiny_text.vocab_size() - 1) == []


def sentencepiece(folder: Path) -> str:
    """Save a tokenizer like Llama 2's: U+2581 for a space, byte tokens by name."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "▁a", "é"]
    vocabulary = {word: i for i, word in enumerate(words)}
    found = Tokenizer(models.BPE(vocabulary, [("▁", "a")], byte_fallback=True, unk_token="<unk>"))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    found.decoder = decoders.Sequence(parts)
    found.add_special_tokens(["<unk>", "<s>", "</s>"])
    found.save(str(folder / "tokenizer.json"))
    return str(folder)


def test_spaces_and_bytes_are_the_same_however_they_are_written(
    paths: tuple[str, str], tmp_path: Path
) -> None:
    """Law: U+0120 and U+2581 both mean a space, `<0xC3>` means that byte, and a token of a letter
    is preferred to tokens of its bytes."""
    theirs, ours = load_vocabulary(sentencepiece(tmp_path)), load_vocabulary(paths[0])
    translation = Translation(
        ours, theirs, vocab_size=ours.vocab_size, draft_size=theirs.vocab_size
    )
    named, words = tiny_text.tokenizer(), Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    both = dict(zip(translation.target_ids, translation.draft_ids, strict=True))
    assert both[id_of(named, "Ġ")] == id_of(words, "▁")
    assert both[id_of(named, "a")] == id_of(words, "a")
    assert both[id_of(named, "Ã")] == id_of(words, "<0xC3>")
    assert translation.pieces(id_of(named, "ab")) == [
        id_of(words, "a"),
        id_of(words, "<0x62>"),
    ]


class Memory:
    """The draft's KV plane: the token whose key each position holds."""

    def __init__(self) -> None:
        self.keys: list[int] = []

    def run(self, tokens: list[int], start: int, before: list[int]) -> None:
        assert self.keys[:start] == before
        self.keys[start : start + len(tokens)] = tokens


@given(st.data())
def test_the_map_of_positions(data: st.DataObject) -> None:
    """Law: after any draft tokens, acceptances, rejections and skips, `ids` is the text in draft
    tokens, `ends` where each target token ends in it, and the first `valid` positions hold its
    keys."""
    pieces = {0: [9], 1: [5, 6], 2: [], 3: [9, 9, 9], 4: [7], 5: [6]}
    reading, memory, text = DraftTokens(), Memory(), list[int]()
    runs = st.booleans()
    for _ in range(data.draw(st.integers(1, 8))):
        text += data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
        reading.follow(text, lambda token: pieces[token])
        assert reading.ids == [piece for token in text for piece in pieces[token]]
        assert [0, *reading.ends][-1] == len(reading.ids)
        for i in range(len(text)):
            written = [piece for token in text[: i + 1] for piece in pieces[token]]
            assert reading.ids[: reading.ends[i]] == written
        assert memory.keys[: reading.valid] == reading.ids[: reading.valid]
        if data.draw(runs) and reading.ids:  # as the proposer does
            start = min(reading.valid, len(reading.ids) - 1)
            memory.run(reading.ids[start:], start, reading.ids[:start])
            reading.valid = len(reading.ids)
            for token in data.draw(st.lists(st.integers(5, 9), max_size=4)):
                reading.drafted.append(token)
                memory.run(
                    [token],
                    len(reading.ids) + len(reading.drafted) - 1,
                    reading.ids + reading.drafted[:-1],
                )


def test_draft_tokens_that_are_kept_are_not_run_again() -> None:
    """Law: an accepted draft token stays computed, up to the first one that differs."""
    reading = DraftTokens()
    reading.follow([1, 2], lambda token: [token])
    reading.valid, reading.drafted = 2, [3, 4, 5]
    reading.follow([1, 2, 3, 4, 8], lambda token: [token])
    assert (reading.valid, reading.ids, reading.drafted) == (4, [1, 2, 3, 4, 8], [])


def test_without_a_block_there_are_no_draft_tokens(paths: tuple[str, str], pair: Pair) -> None:
    """Law: when the draft's positions run out first, the text continues without draft tokens."""
    engine = Engine(config(paths, 3), pair=pair)
    proposer = engine._proposer._main
    assert isinstance(proposer, ForeignDraftProposer)
    proposer._free = []
    submit_all(engine, PROMPT, {"plain": FIELDS["plain"]})
    assert Replies(run(engine)).last["plain"].proposed == 0


def test_a_vocabulary_that_is_hardly_shared_is_refused(
    paths: tuple[str, str],
    pair: Pair,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Bad input: one sentence with the figures; if the overlap is enough, a log line."""
    assert pair.draft is not None
    with caplog.at_level(logging.INFO):
        check_pair(pair.target, pair.draft)
    assert "262 of its 262 tokens are among the target's 275" in caplog.text
    monkeypatch.setattr("engine.model.fit.LEAST_SHARED", 1.1)
    with pytest.raises(ModelError, match="only 262 of its 262 tokens are among the target's"):
        check_pair(pair.target, pair.draft)
