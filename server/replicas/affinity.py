"""Affinity: chooses the replica for a request: the one that holds the longest prefix ("head") of
its prompt, unless its load is much above the others'; then the next one. Ties go to the least load.

Guarantees: the chosen replica's load is at most `bound` times the mean plus what the prefix saves
there, so a popular prefix spreads over as many replicas as it needs. This also holds for the sum of
several routers, each of which knows only its own requests. Memory per replica is bounded. A new
replica gets requests whose prefix no replica holds, or for which the others have no room; when a
replica leaves, only its own requests move. Does not depend on Ray.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import msgspec

BOUND = 1.25  # times the mean load; lower costs cache hits (`python -m tests.process.affinity`)
HEADS = 16_384  # per replica: a million prompt tokens, or more if prompts are long
_APART = 256  # bytes between the ends of two prefixes, about four blocks of 16 tokens ...
_SHARE = 16  # ... or 1/16 of the length if that is more, so that long prompts have few prefixes
_TOKEN = 4  # bytes per token
_REPLY = 256  # a reply counts as at most this many tokens: larger limits are rarely used up
ATTENDED = 8  # cached tokens that cost as much as one computed token: each step attends to them


class _Body(msgspec.Struct):
    """The fields that determine a prompt, in the order in which templates use them."""

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
    """What the choice needs of a request. `heads`: digests of the salt and increasing prefixes of
    the prompt; `ends`: tokens in each; `whole`: digest of all. Tokens are estimated from bytes."""

    heads: tuple[bytes, ...]
    ends: tuple[int, ...]
    whole: bytes
    prompt_tokens: int
    reply_tokens: int


def read_key(body: bytes) -> Key:
    """Return the key of a request to any endpoint. If the body is not JSON, is nested too deep or
    is cut off, its bytes count as the prompt."""
    try:
        given = _DECODER.decode(body)
    except (msgspec.DecodeError, RecursionError):
        given = _Body(prompt=msgspec.Raw(body))
    lead = bytes(given.instructions) + bytes(given.system)  # a request has one of them
    text = b"\0".join(
        (bytes(given.tools), lead, *map(bytes, (given.prompt, given.messages, given.input)))
    )
    digest, start = blake2b(bytes(given.cache_salt) + b"\0", digest_size=8), 0
    heads, ends = list[bytes](), list[int]()
    while (end := start + max(_APART, start // _SHARE)) <= len(text):
        digest.update(text[start:end])
        heads.append(digest.digest())
        ends.append(end // _TOKEN)
        start = end
    digest.update(text[start:])
    values = (given.max_tokens, given.max_completion_tokens, given.max_output_tokens)
    limits = [limit for limit in values if type(limit) is int and limit >= 0]
    return Key(
        heads=tuple(heads),
        ends=tuple(ends),
        whole=digest.digest(),
        prompt_tokens=len(text) // _TOKEN,
        reply_tokens=min([*limits, _REPLY]),
    )


class Affinity:
    """Remembers which prefixes were sent to which replica: the `heads` most recently used of each.
    This mirrors the replica's prefix cache, which is LRU too. Raises ValueError for a `bound` below
    1."""

    def __init__(self, *, bound: float = BOUND, heads: int = HEADS) -> None:
        if bound < 1:
            raise ValueError(f"bound = {bound}: a load can't be below the mean everywhere; from 1")
        self._bound = bound
        self._most = heads
        self._held: dict[str, OrderedDict[bytes, None]] = {}

    def order(self, key: Key, loads: Mapping[str, float]) -> list[str]:
        """Return all replicas, best first. `loads`: tokens that each still has to compute."""
        held = {replica: self._num_held(key, replica) for replica in loads}
        tokens = {replica: key.ends[num - 1] if num else 0 for replica, num in held.items()}
        limit = self._bound * sum(loads.values()) / max(len(loads), 1)
        least = min(tokens.values(), default=0)  # saved on any replica

        def rank(replica: str) -> tuple[bool, int, float, bytes]:
            news = key.heads[held[replica]] if held[replica] < len(key.heads) else key.whole
            # Rendezvous hashing: independent routers agree.
            turn = blake2b(replica.encode(), key=news, digest_size=8).digest()
            is_full = loads[replica] > limit + tokens[replica] - least
            return is_full, -tokens[replica], loads[replica], turn

        return sorted(loads, key=rank)

    def send(self, key: Key, replica: str) -> int:
        """Record that the request goes to `replica`. Return the load in tokens that it adds there
        until it ends."""
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
        """Forget all other replicas."""
        self._held = {name: known for name, known in self._held.items() if name in replicas}

    def _num_held(self, key: Key, replica: str) -> int:
        """Return how many of the prefixes this replica holds. A replica that holds one also holds
        the shorter ones, so binary search works."""
        known = self._held.get(replica, OrderedDict[bytes, None]())
        low, high = 0, len(key.heads)
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if key.heads[middle] in known else (low, middle)
        return low
