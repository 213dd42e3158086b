"""A decoder's forward pass as one compiled call, and `chain`, which alternates forwards and draws.

Activations are float32 between matrix products. In bfloat16 they are rounded at the input of a
product and when stored as keys and values. Each row's arithmetic is independent of other rows, so a
token's logits are bit-identical alone, in a batch, in verification, and after any split of the
prompt into prefill chunks.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.cpu.jit import fast, fast_in_place
from engine.cpu.kernels_attention import attend, buffers_for, flatten, places_of
from engine.cpu.kernels_draws import draw_draft, space_for
from engine.cpu.kernels_products import product
from engine.cpu.kernels_rows import add, gate, normalise, rotate
from engine.cpu.kernels_tiles import room
from engine.cpu.vectors import PANEL
from engine.scheduling.segment import LAST

_BLOCK_ROWS = 64  # rows whose activations stay in the L2 cache beside a layer's weights


@fast
def forward(
    parts: Any, tokens: Any, positions: Any, spans: Any, paths: Any, logits_indices: Any,
    tables: Any, block_size: Any, weights: Any, angles: Any, shape: Any, numbers: Any, keys: Any,
    values: Any, shown: Any, layers: Any, states: Any, logits: Any,
) -> None:  # fmt: skip
    """Compute the logits of the rows `logits_indices`, and write the outputs of `layers` (may
    include LAST) for the rows `shown` to `states` `[shown, layers, width]`. `spans` `[any, 3]`: see
    `kernels_attention.attend`, with one row of `tables` per span; one sequence may have several
    spans, in order. `paths`: see `kernels_attention.flatten`. `keys`, `values`: words `[layers,
    kv_heads, slots, words]`. `weights`: from `weights.packed_weights`. `shape`: heads, KV heads,
    inner width, head dim. `numbers`: epsilon, attention scale, `rounded` of `product`."""
    embed, norm, query_key_value, output, mlp_norm, gate_up, down, last_norm, head = weights
    epsilon, scaling, rounded = numbers
    heads, kv_heads, inner, dim = shape
    count, width, some = len(tokens), embed.shape[1], min(len(tokens), _BLOCK_ROWS)
    hidden, normed = room(count, width), room(count, width)
    packed = room(count, padded((heads + 2 * kv_heads) * dim))
    attended, narrow = room(count, heads * dim), room(some, inner)
    wide, added = room(some, padded(2 * inner)), room(some, padded(width))
    seen, places = _causal(spans, count), places_of(spans, tables, block_size, keys.shape[3])
    flatten(paths, spans, tables, block_size, keys.shape[3], places)
    buffers = buffers_for(spans, heads // kv_heads, dim)
    for row in range(count):
        _embed(embed[tokens[row]], hidden[row])
    for layer in range(norm.shape[0]):
        for first in range(0, count, some):
            rows, n = packed[first : first + some], min(some, count - first)
            normalise(hidden[first : first + n], norm[layer], epsilon, normed[:n])
            product(normed[:n], query_key_value[layer], rounded, rows)
            rotate(rows, angles[0], angles[1], positions[first:], heads + kv_heads)
        attend(parts, packed, heads, spans, seen, places, scaling, keys[layer], values[layer],
               buffers, attended)  # fmt: skip
        for first in range(0, count, some):
            rows, n = hidden[first : first + some], min(some, count - first)
            product(attended[first : first + some], output[layer], rounded, added[:n])
            add(added, rows)
            normalise(rows, mlp_norm[layer], epsilon, normed[:n])
            product(normed[:n], gate_up[layer], rounded, wide[:n])
            gate(wide, narrow[:n])
            product(narrow[:n], down[layer], rounded, added[:n])
            add(added, rows)
        _copy_states(hidden, layer, shown, layers, states)
    if (layers == LAST).any():
        normalise(hidden, last_norm, epsilon, normed)
        _copy_states(normed, LAST, shown, layers, states)
    for i in range(len(logits_indices)):  # ascending, so no row is overwritten before it is read
        hidden[i] = hidden[logits_indices[i]]
    normalise(hidden[: len(logits_indices)], last_norm, epsilon, normed[: len(logits_indices)])
    product(normed[: len(logits_indices)], head, rounded, logits)


@fast
def _copy_states(rows: Any, layer: Any, shown: Any, layers: Any, states: Any) -> None:
    for at in range(len(layers)):
        if layers[at] == layer:
            for i in range(len(shown)):
                states[i, at] = rows[shown[i]]


@fast
def padded(outputs: Any) -> Any:
    return (outputs + PANEL - 1) // PANEL * PANEL


@fast
def _causal(spans: Any, count: Any) -> Any:
    """Return causal masks: each row sees itself and all earlier rows of its span."""
    seen = np.empty(count, np.uint64)
    for span in range(spans.shape[0]):
        for row in range(spans[span, 1]):
            seen[spans[span, 0] + row] = (np.uint64(2) << np.uint64(row)) - np.uint64(1)
    return seen


@fast
def _embed(numbers: Any, out: Any) -> None:
    """Copy float32, or bfloat16 given as its bits, to float32."""
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
    margins: Any, second_best: Any,
) -> None:  # fmt: skip
    """Draft up to `steps` tokens per sequence: write tokens, margins and second-best tokens to
    `out`, `margins` and `second_best` `[sequences, steps]`. NOT_FINITE ends a sequence; no forward
    runs for its last token. `items` `[n, 9]`, `words`: as for `kernels_draws.draw`, where an
    item has its row of `logits`, its number of steps, and, last, how many earlier tokens `tables`
    leave out. `penalties`: from `engine.sampling.penalties.packed`."""
    count, vocab = len(items), logits.shape[1]
    wide = np.empty((count, padded(vocab)), np.float32)
    for i in range(count):
        wide[i, :vocab] = logits[items[i, 0]]
    rows, space = np.arange(count), space_for(vocab)
    spans, tokens, live = np.ones((count, 3), np.int64), np.empty(count, np.int64), count
    spans[:, 0] = rows
    positions = np.empty(count, np.int64)
    own, nothing = np.empty_like(tables), np.empty((0, 0, 0), np.float32)
    for step in range(out.shape[1]):
        left = 0
        for i in range(live):
            row = rows[i]
            item = items[row]
            _penalise(wide[i, :vocab], row, penalties)
            token, margin, second = draw_draft(wide[i, :vocab], words, item, item[2] + step, space)
            out[row, step], margins[row, step], second_best[row, step] = token, margin, second
            if token >= 0 and step + 1 < item[1]:
                _remember(row, token, penalties)
                rows[left], tokens[left], positions[left] = row, token, item[2] + step
                spans[left, 2] = positions[left] - item[8]
                own[left] = tables[row]
                left += 1
        live = left
        if live == 0:
            return
        forward(
            parts, tokens[:live], positions[:live], spans[:live], spans[:0], np.arange(live),
            own, block_size, weights, angles, shape, numbers, keys, values, rows[:0], rows[:0],
            nothing, wide[:live],
        )  # fmt: skip


@fast_in_place
def _penalise(row: Any, sequence: Any, penalties: Any) -> None:
    """Apply penalties in place, like `engine.sampling.logits`."""
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


@fast_in_place
def _remember(sequence: Any, token: Any, penalties: Any) -> None:
    """Count a new token of a sequence that has penalties."""
    table, spans, _ = penalties
    first, count = spans[sequence]
    for i in range(first, first + count):
        if table[i, 0] == token:
            table[i, 1] += 1
            return
    if count > 0:
        table[first + count, 0], table[first + count, 1] = token, 1
        spans[sequence, 1] = count + 1
