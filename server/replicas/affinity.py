"""Affinity: which replica serves a request. The one that holds the longest head of its prompt, as
long as it has no more to do than the others by much; else the next one, and of equals the one with
the least to do.

Promises: the chosen replica has a load of at most `bound` times the mean plus what the head saves
there; so a head that many ask for is held by as many replicas as it takes. This holds for the sum
of several routers, too, each of which knows its own requests alone. What is remembered of a replica
is bounded. One that comes takes what has no place yet or no room; one that goes gives away only its
own. No Ray here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import msgspec

BOUND = 1.25  # of the mean load; lower ones cost hits (`python -m tests.process.affinity`)
HEADS = 16_384  # of one replica: a million tokens of prompts, or more where they are long
_APART = 256  # bytes between the ends of two heads, about four blocks of 16 tokens ...
_SHARE = 16  # ... or this part of the length, so that a prompt of any length has few heads
_TOKEN = 4  # bytes
_REPLY = 256  # tokens that a reply counts for at most: who allows more seldom needs them
ATTENDED = 8  # tokens of a head that are as much work as one to compute: each step attends to them


class _Body(msgspec.Struct):
    """What decides on a prompt, in the order in which templates write it."""

    cache_salt: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None


_DECODER = msgspec.json.Decoder(_Body)


@dataclass(frozen=True, slots=True)
class Key:
    """What the choice needs of a request. `heads`: digests of the salt and of ever longer heads of
    the prompt, `ends` their tokens, `whole` that of all of it. Tokens are estimates, by bytes."""

    heads: tuple[bytes, ...]
    ends: tuple[int, ...]
    whole: bytes
    prompt_tokens: int
    reply_tokens: int


def read_key(body: bytes) -> Key:
    """Of a request to any endpoint. One that is no JSON, is nested too deep, or was cut by a proxy,
    has its bytes as its prompt."""
    try:
        asked = _DECODER.decode(body)
    except (msgspec.DecodeError, RecursionError):
        asked = _Body(prompt=msgspec.Raw(body))
    lead = bytes(asked.instructions) + bytes(asked.system)  # of which a request has one
    text = b"\0".join(
        (bytes(asked.tools), lead, *map(bytes, (asked.prompt, asked.messages, asked.input)))
    )
    digest, start = blake2b(bytes(asked.cache_salt) + b"\0", digest_size=8), 0
    heads, ends = list[bytes](), list[int]()
    while (end := start + max(_APART, start // _SHARE)) <= len(text):
        digest.update(text[start:end])
        heads.append(digest.digest())
        ends.append(end // _TOKEN)
        start = end
    digest.update(text[start:])
    said = (asked.max_tokens, asked.max_completion_tokens, asked.max_output_tokens)
    limits = [limit for limit in said if type(limit) is int and limit >= 0]
    return Key(
        heads=tuple(heads),
        ends=tuple(ends),
        whole=digest.digest(),
        prompt_tokens=len(text) // _TOKEN,
        reply_tokens=min([*limits, _REPLY]),
    )


class Affinity:
    """Remembers which heads were sent to which replica, the `heads` that were used last of each.
    That is as its prefix cache does: both forget the longest first. Raises ValueError for a `bound`
    below 1."""

    def __init__(self, *, bound: float = BOUND, heads: int = HEADS) -> None:
        if bound < 1:
            raise ValueError(f"bound = {bound}: a load can't be below the mean everywhere; from 1")
        self._bound = bound
        self._most = heads
        self._held: dict[str, OrderedDict[bytes, None]] = {}

    def order(self, key: Key, loads: Mapping[str, float]) -> list[str]:
        """All replicas, best first. `loads`: tokens that each one still has to compute."""
        held = {replica: self._num_held(key, replica) for replica in loads}
        tokens = {replica: key.ends[num - 1] if num else 0 for replica, num in held.items()}
        limit = self._bound * sum(loads.values()) / max(len(loads), 1)
        least = min(tokens.values(), default=0)  # ... are saved wherever it goes

        def rank(replica: str) -> tuple[bool, int, float, bytes]:
            news = key.heads[held[replica]] if held[replica] < len(key.heads) else key.whole
            # Rendezvous hashing: routers that know nothing of each other agree.
            turn = blake2b(replica.encode(), key=news, digest_size=8).digest()
            is_full = loads[replica] > limit + tokens[replica] - least
            return is_full, -tokens[replica], loads[replica], turn

        return sorted(loads, key=rank)

    def send(self, key: Key, replica: str) -> int:
        """It goes there: the load, in tokens, that this replica has more until it has ended."""
        known = self._held.setdefault(replica, OrderedDict())
        num = self._num_held(key, replica)
        for head in reversed(key.heads):
            known[head] = None
            known.move_to_end(head)
        while len(known) > self._most:
            known.popitem(last=False)
        cached = key.ends[num - 1] if num else 0
        return key.prompt_tokens - cached + cached // ATTENDED + key.reply_tokens

    def keep(self, replicas: Collection[str]) -> None:
        """These are there; others are forgotten."""
        self._held = {name: known for name, known in self._held.items() if name in replicas}

    def _num_held(self, key: Key, replica: str) -> int:
        """How many of its heads this replica holds. Who holds one holds the shorter ones, so that
        it is looked for by halves."""
        known = self._held.get(replica, OrderedDict[bytes, None]())
        low, high = 0, len(key.heads)
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if key.heads[middle] in known else (low, middle)
        return low
