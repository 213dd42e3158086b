"""Block tables for compiled code: they are reused between steps and are never stale."""

from __future__ import annotations

import random
from array import array

import numpy as np

from engine.cpu.decoder import BlockTables


def test_a_table_holds_the_current_blocks() -> None:
    """Law: when sequences arrive, grow, end, change places or get other blocks in the same list,
    row i begins with the current blocks of sequence i; the table is contiguous."""
    rng = random.Random(5)
    tables = BlockTables(16)
    held: list[list[int]] = [[rng.randrange(99) for _ in range(3)] for _ in range(4)]
    for _ in range(400):
        match rng.randrange(6):
            case 0:
                held.append([rng.randrange(99)])
            case 1 if len(held) > 1:
                held.pop(rng.randrange(len(held)))
            case 2:
                rng.shuffle(held)
            case 3:
                rng.choice(held).append(rng.randrange(99))
            case 4:
                changed = rng.choice(held)
                changed[rng.randrange(len(changed))] = rng.randrange(99)
        table = tables.of([(blocks, 16 * len(blocks)) for blocks in held])
        assert table.flags.c_contiguous
        assert table.dtype == np.int64
        for row, blocks in zip(table, held, strict=True):
            assert row[: len(blocks)].tolist() == blocks


def test_known_blocks_are_not_read_again() -> None:
    """Bug: a sequence's blocks are an array, which never equals the list that was kept, so every
    forward converted all block tables again, in time that grows with the text."""
    tables, blocks = BlockTables(16), array("i", [3, 1, 4])
    tables.of([(blocks, 48)])[0, 0] = 99
    assert tables.of([(blocks, 48)]).tolist() == [[99, 1, 4]]
    blocks[2] = 5
    assert tables.of([(blocks, 48)]).tolist() == [[3, 1, 5]]
