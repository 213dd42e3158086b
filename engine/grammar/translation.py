"""Translation between the vocabularies of a target and a draft with different tokenizers
(token-level intersection, arXiv:2502.05202).

Tokens are compared by their bytes, so it does not matter how a tokenizer writes a space or a byte.
Special tokens are compared by name, but EOS tokens count as equal.
"""

from __future__ import annotations

from functools import cached_property

from llguidance import LLTokenizer

Key = tuple[bool, bytes]  # (whether the token is special, its bytes or name)


class Translation:
    """`target_ids` and `draft_ids`: the shared tokens as parallel lists, each id once.
    `vocab_size`: the width of the target's logits."""

    def __init__(
        self, target: LLTokenizer, draft: LLTokenizer, *, vocab_size: int, draft_size: int
    ) -> None:
        self.vocab_size = vocab_size
        self._draft = draft
        self._keys, theirs = _keys(target, vocab_size), _keys(draft, draft_size)
        # Of several ids with the same bytes, the last one: pieces come after single bytes.
        ours = {key: token for token, key in enumerate(self._keys) if key is not None}
        self._known = {key: token for token, key in enumerate(theirs) if key is not None}
        self.sizes = len(ours), len(self._known)
        both = [key for key in ours if key in self._known]
        ends = int(target.eos_token), int(draft.eos_token)
        self._end = {ends[0]: [ends[1]]} if ends[1] < draft_size else {}
        shared = {ours[key]: self._known[key] for key in both}
        if ends[0] not in shared and ends[1] not in shared.values():
            shared |= {end: ids[0] for end, ids in self._end.items()}
        self.target_ids, self.draft_ids = list(shared), list(shared.values())
        self._pieces: dict[int, list[int]] = {}

    @property
    def shared_fraction(self) -> float:
        """The share of the smaller vocabulary that both have."""
        return len(self.target_ids) / max(min(self.sizes), 1)

    def pieces(self, token: int) -> list[int]:
        """Return the draft's tokens for a target token: the same token, or its text in the draft's
        tokenization; [] if it has no text, or bytes that the draft lacks."""
        found = self._pieces.get(token)
        if found is None:
            found = self._pieces[token] = self._retokenized(token)
        return found

    def _retokenized(self, token: int) -> list[int]:
        key = self._keys[token] if token < len(self._keys) else None
        if key is None:
            return []
        if key in self._known:
            return [self._known[key]]
        if token in self._end:
            return self._end[token]
        text = key[1]
        ids = list(self._draft.tokenize_bytes(text))
        if self._draft.decode_bytes(ids) == text:
            return ids
        return self._longest_first(text)  # part of a character, or the tokenizer adds a space

    def _longest_first(self, text: bytes) -> list[int]:
        ids: list[int] = []
        while text:
            sizes = range(min(len(text), self._longest), 0, -1)
            size = next((n for n in sizes if (False, text[:n]) in self._known), None)
            if size is None:
                return []
            ids.append(self._known[False, text[:size]])
            text = text[size:]
        return ids

    @cached_property
    def _longest(self) -> int:
        return max(len(text) for _, text in self._known)


def _keys(tokenizer: LLTokenizer, size: int) -> list[Key | None]:
    """Return the key of each id; None for unused ids, which llguidance shows as their number."""
    texts = [tokenizer.decode_bytes([i]) for i in range(min(tokenizer.vocab_size, size))]
    return [
        (tokenizer.is_special_token(i), text) if text not in (b"", b"<[%d]>" % i) else None
        for i, text in enumerate(texts)
    ]
