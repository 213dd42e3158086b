"""A whole decoder as one compiled call, and a chain of guesses: forwards with draws between them.

Rows are float32 between the products. In bfloat16 they are rounded where they meet a product or are
kept as keys and values. Every row goes through the same arithmetic whoever its neighbours are, so
a token's logits are the same to the bit alone, in a batch, in a verification, and behind a prompt
that was computed in other chunks.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.cpu.jit import fast
from engine.cpu.kernels_attention import attend, buffers_for, follow, places_of
from engine.cpu.kernels_draws import guess, space_for
from engine.cpu.kernels_products import product
from engine.cpu.kernels_rows import add, gate, normalise, rotate
from engine.cpu.kernels_tiles import room
from engine.cpu.vectors import PANEL
from engine.scheduling.segment import LAST


@fast
def forward(
    parts: Any, tokens: Any, positions: Any, facts: Any, paths: Any, asked: Any, tables: Any,
    block_size: Any, weights: Any, angles: Any, shape: Any, numbers: Any, keys: Any, values: Any,
    shown: Any, layers: Any, states: Any, logits: Any,
) -> None:  # fmt: skip
    """Logits of the rows `asked`, and of the rows `shown` what stands behind `layers`, LAST among
    them, to `states` `[shown, layers, width]`. `facts` `[spans, 3]` as of
    `kernels_attention.attend`, a sequence each in `tables`, or parts of one in order; `paths` as of
    `kernels_attention.follow`; `keys` and `values` words `[layers, kv_heads, slots, words]`.
    `weights` of `weights.packed_weights`; `shape`: heads, key-value heads, inner width, dimensions
    of a head; `numbers`: epsilon, scaling of attention, and `rounded` of `product`."""
    embed, norm, query_key_value, output, mlp_norm, gate_up, down, last_norm, head = weights
    epsilon, scaling, rounded = numbers
    heads, kv_heads, inner, dim = shape
    count, width = len(tokens), embed.shape[1]
    hidden, normed = room(count, width), room(count, width)
    packed = room(count, padded((heads + 2 * kv_heads) * dim))
    attended, narrow = room(count, heads * dim), room(count, inner)
    wide, added = room(count, padded(2 * inner)), room(count, padded(width))
    seen, places = _causal(facts, count), places_of(facts, tables, block_size, keys.shape[3])
    follow(paths, facts, tables, block_size, keys.shape[3], places)
    buffers = buffers_for(facts, heads // kv_heads, dim)
    for row in range(count):
        _embed(embed[tokens[row]], hidden[row])
    for layer in range(norm.shape[0]):
        normalise(hidden, norm[layer], epsilon, normed)
        product(normed, query_key_value[layer], rounded, packed)
        rotate(packed, angles[0], angles[1], positions, heads + kv_heads)
        attend(
            parts, packed, heads, facts, seen, places, scaling, keys[layer], values[layer],
            buffers, attended,
        )  # fmt: skip
        product(attended, output[layer], rounded, added)
        add(added, hidden)
        normalise(hidden, mlp_norm[layer], epsilon, normed)
        product(normed, gate_up[layer], rounded, wide)
        gate(wide, narrow)
        product(narrow, down[layer], rounded, added)
        add(added, hidden)
        _show(hidden, layer, shown, layers, states)
    if (layers == LAST).any():
        normalise(hidden, last_norm, epsilon, normed)
        _show(normed, LAST, shown, layers, states)
    for i in range(len(asked)):  # rising, so nothing is written over that is still needed
        hidden[i] = hidden[asked[i]]
    normalise(hidden[: len(asked)], last_norm, epsilon, normed[: len(asked)])
    product(normed[: len(asked)], head, rounded, logits)


@fast
def _show(rows: Any, layer: Any, shown: Any, layers: Any, states: Any) -> None:
    for at in range(len(layers)):
        if layers[at] == layer:
            for i in range(len(shown)):
                states[i, at] = rows[shown[i]]


@fast
def padded(outputs: Any) -> Any:
    return (outputs + PANEL - 1) // PANEL * PANEL


@fast
def _causal(facts: Any, count: Any) -> Any:
    """Masks of rows that see all before them and themselves."""
    seen = np.empty(count, np.uint64)
    for span in range(facts.shape[0]):
        for row in range(facts[span, 1]):
            seen[facts[span, 0] + row] = (np.uint64(2) << np.uint64(row)) - np.uint64(1)
    return seen


@fast
def _embed(numbers: Any, out: Any) -> None:
    """float32, or the bits of bfloat16, to float32."""
    if numbers.itemsize == 4:
        out[:] = numbers
        return
    bits = out.view(np.uint32)
    for i in range(len(numbers)):
        bits[i] = np.uint32(numbers[i]) << np.uint32(16)


@fast
def chain(
    parts: Any, logits: Any, items: Any, words: Any, tables: Any, block_size: Any, weights: Any,
    angles: Any, shape: Any, numbers: Any, keys: Any, values: Any, penalties: Any, out: Any,
    leads: Any, second_best: Any,
) -> None:  # fmt: skip
    """The token, the lead and the next best token of each sequence's steps into `out`, `leads` and
    `second_best` `[sequences, steps]`; NOT_FINITE is a sequence's last. The last one is not run.
    `items`, `words` as of `kernels_draws.draw`, the first row of `logits` being the one before all,
    the others those that follow; and of each the tokens before it that `tables` leave out.
    `penalties` as of `engine.sampling.penalties.packed`."""
    count, vocab = len(items), logits.shape[1]
    wide = np.empty((count, padded(vocab)), np.float32)
    for i in range(count):
        wide[i, :vocab] = logits[items[i, 0]]
    rows, space = np.arange(count), space_for(vocab)
    facts, tokens, live = np.ones((count, 3), np.int64), np.empty(count, np.int64), count
    facts[:, 0] = rows
    positions = np.empty(count, np.int64)
    own, nothing = np.empty_like(tables), np.empty((0, 0, 0), np.float32)
    for step in range(out.shape[1]):
        left = 0
        for i in range(live):
            mine = rows[i]
            item = items[mine]
            _penalise(wide[i, :vocab], mine, penalties)
            token, lead, second = guess(wide[i, :vocab], words, item, item[2] + step, space)
            out[mine, step], leads[mine, step], second_best[mine, step] = token, lead, second
            if token >= 0 and step + 1 < item[1]:
                _remember(mine, token, penalties)
                rows[left], tokens[left], positions[left] = mine, token, item[2] + step
                facts[left, 2] = positions[left] - item[8]
                own[left] = tables[mine]
                left += 1
        live = left
        if live == 0:
            return
        forward(
            parts, tokens[:live], positions[:live], facts[:live], facts[:0], np.arange(live),
            own, block_size, weights, angles, shape, numbers, keys, values, rows[:0], rows[:0],
            nothing, wide[:live],
        )  # fmt: skip


@fast
def _penalise(row: Any, sequence: Any, penalties: Any) -> None:
    """As `engine.sampling.logits` does, in place. Factors: repetition, frequency, presence."""
    table, spans, factors = penalties
    repetition, frequency, presence = factors[sequence]
    first, count = spans[sequence]
    for i in range(first, first + count):
        token, times = table[i, 0], table[i, 1]
        number = row[token]
        number = number / repetition if number > 0 else number * repetition
        if times > 0:
            number -= np.float32(times) * frequency + presence
        row[token] = number


@fast
def _remember(sequence: Any, token: Any, penalties: Any) -> None:
    """A token more of a sequence that has penalties."""
    table, spans, _ = penalties
    first, count = spans[sequence]
    for i in range(first, first + count):
        if table[i, 0] == token:
            table[i, 1] += 1
            return
    if count > 0:
        table[first + count, 0], table[first + count, 1] = token, 1
        spans[sequence, 1] = count + 1
