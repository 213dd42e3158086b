"""The tables of a text's tokens that compiled code applies penalties from."""

from __future__ import annotations

import random
from typing import Any

from engine.messages import SamplingParams
from engine.sampling.penalties import PenaltyTables, packed
from engine.scheduling.sequence import Sequence


def sequence(prompt: list[int], **fields: Any) -> Sequence:
    return Sequence("a", SamplingParams(seed=0, max_tokens=9, **fields), prompt, len(prompt))


def test_a_table_grows_with_its_text() -> None:
    """Law: a table updated step by step equals one built at once: every token in the text, and how
    often it was generated."""
    rng = random.Random(0)
    tables, seq = PenaltyTables(), sequence([rng.randrange(200) for _ in range(150)])
    for _ in range(60):
        found = tables.of(seq)
        generated = seq.tokens[seq.num_prompt :]
        expected = {token: generated.count(token) for token in seq.tokens}
        assert dict(found.table.tolist()) == expected
        assert len(found.table) == len(expected)
        seq.tokens += [rng.randrange(200) for _ in range(rng.randrange(4))]


def test_another_text_is_another_table() -> None:
    tables = PenaltyTables()
    one, other = sequence([1, 2]), sequence([3])
    assert tables.of(one).table.tolist() == [[1, 0], [2, 0]]
    assert tables.of(other).table.tolist() == [[3, 0]]
    tables.forget(one)
    assert tables.of(one).table.tolist() == [[1, 0], [2, 0]]


def test_tables_are_packed_with_room_behind_each() -> None:
    """Law: a request without penalties takes no room and changes nothing."""
    penalties = PenaltyTables().of(sequence([5, 6], repetition_penalty=1.5, presence_penalty=0.5))
    table, spans, factors = packed([None, penalties, None, penalties], 3)
    assert spans.tolist() == [[0, 0], [0, 2], [0, 0], [5, 2]]
    assert factors.tolist() == [[1, 1, 1], [1.5, 0, 0.5], [1, 1, 1], [1.5, 0, 0.5]]
    assert table[:2].tolist() == table[5:7].tolist() == [[5, 0], [6, 0]]
    assert len(table) == 10
