"""Detokenizer and StopStrings: their increments do not depend on how the tokens are split."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import combinations

import pytest

from server.text.detokenizer import Detokenizer, StopStrings
from server.text.tokenizer import Tokenizer, text_piece_bytes
from tests.support.byte_tokenizer import BOS, EOS, IM_END, ByteTokenizer

ZWJ = "\N{ZERO WIDTH JOINER}"
TEXTS = [
    "plain",
    "naïve façade",
    "日本語のテキスト",
    f"\U0001f468{ZWJ}\U0001f469{ZWJ}\U0001f467 family",
    "\U0001f1e9\U0001f1ea flag, \U0001f44d\U0001f3fd skin",
    "e\N{COMBINING ACUTE ACCENT} \ufffd\ufffdx \U0010ffff",
    "\x00\t\r\n ",
]
BROKEN = [
    b"\xff",
    b"\xe2\x82",
    b"\xe2\xe2\xe2",
    b"\x80\x80",
    b"\xf0\x9f\x98",
    b"\xed\xa0\x80",
    b"\xc0",
]


class PieceTokenizer(Tokenizer):
    """Like SentencePiece: a word carries its leading space, which the first word of a decode loses,
    and bytes without a piece are `<0xNN>` tokens; a run of those is decoded as one."""

    def __init__(self) -> None:
        self.joins_bytes = False
        self.pieces = ["<s>", *(f"<0x{byte:02X}>" for byte in range(256))]
        self.pieces += [
            "\u2581",
            "\u2581the",
            "\u2581fox",
            "es",
            "\u2581\u2581",
            "\u2581日本",
            "語",
        ]
        self.vocab_size = len(self.pieces)

    def is_special(self, token: int) -> bool:
        return token == 0

    def token_bytes(self, token: int) -> bytes:
        return text_piece_bytes(self.pieces[token])

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        text, run = "", b""
        for token in ids:
            if 1 <= token <= 256:
                run += bytes([token - 1])
            elif not (skip_special_tokens and token == 0):
                text, run = text + self._run(run) + self.token_bytes(token).decode(), b""
        return (text + self._run(run)).removeprefix(" ")

    @staticmethod
    def _run(run: bytes) -> str:
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(run)


def splits(ids: Sequence[int], random_: random.Random) -> Iterator[list[int]]:
    """Yield `ids` in consecutive groups of one to five, as speculative steps deliver them."""
    at = 0
    while at < len(ids):
        size = random_.randint(1, 5)
        yield list(ids[at : at + size])
        at += size


def increments(
    tokenizer: object, groups: Sequence[Sequence[int]], *, skip: bool = True
) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)  # type: ignore[arg-type]
    return [*(detokenizer.push(group) for group in groups), detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_byte_by_byte_text_is_whole_characters_and_complete(text: str) -> None:
    """Law: byte by byte, each increment is whole characters, and together they are the text."""
    parts = increments(ByteTokenizer(), [[byte] for byte in text.encode()])
    assert "".join(parts) == text
    assert [part for part in parts if part] == list(text)


@pytest.mark.parametrize("text", TEXTS)
def test_every_pair_of_cuts(text: str) -> None:
    """Law: three increments cut at any two places give the text, and none invents U+FFFD."""
    ids = list(text.encode())
    for low, high in combinations(range(len(ids) + 1), 2):
        parts = increments(ByteTokenizer(), [ids[:low], ids[low:high], ids[high:]])
        assert "".join(parts) == text
        assert all(part in text for part in parts)


@pytest.mark.parametrize("skip", [True, False])
def test_random_bytes_specials_and_padding(skip: bool) -> None:
    """Law: concatenated increments equal the decode of all ids, also for invalid bytes, special
    tokens within a character, and ids beyond the tokenizer's vocabulary."""
    random_ = random.Random(1)
    tokenizer = ByteTokenizer(vocab_size=300)
    for _ in range(3000):
        ids: list[int] = []
        for _ in range(random_.randint(1, 6)):
            ids += random_.choice(
                [
                    list(random_.choice(TEXTS)[:3].encode()),
                    list(random_.choice(BROKEN)),
                    [random_.choice([EOS, IM_END, BOS, 299])],
                    [random_.randrange(256)],
                ]
            )
        parts = increments(tokenizer, list(splits(ids, random_)), skip=skip)
        assert "".join(parts) == tokenizer.decode(ids, skip_special_tokens=skip), ids


def test_the_fast_and_the_slow_path_agree() -> None:
    """Law: the fast path (concatenated bytes) and the slow one (a window, decoded twice) give the
    same increments, even for invalid bytes."""
    random_ = random.Random(7)
    short, long = ByteTokenizer(), ByteTokenizer()
    long.joins_bytes = False
    for _ in range(300):
        text = "".join(random_.choices([*TEXTS, "a"], k=3)).encode()
        broken = b"".join(random_.choices([*BROKEN, text, b"x"], k=6))
        ids = [random_.choice([*broken, EOS, IM_END]) for _ in range(9)] + list(broken)
        groups = list(splits(ids, random_))
        assert increments(short, groups) == increments(long, groups)


def test_special_token_within_a_character_is_skipped() -> None:
    """Law: a skipped token has no text and does not end a character."""
    euro = list("€".encode())
    assert increments(ByteTokenizer(), [[euro[0]], [EOS], euro[1:]]) == ["", "", "€", ""]


def test_incomplete_character_waits_but_not_what_precedes_it() -> None:
    """Law: only a character that may still be completed is held back."""
    detokenizer = Detokenizer(ByteTokenizer(), skip_special_tokens=True)
    assert detokenizer.push(b"abc\xe2\x82") == "abc"
    assert detokenizer.push(b"\xacd") == "€d"
    assert detokenizer.push(b"\xf0\x9f") == ""
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_endless_broken_bytes_keep_the_window_short() -> None:
    """Bug: a window that grows with every lead byte makes a request quadratic, and logit_bias lets
    any client cause that."""
    tokenizer = ByteTokenizer()
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=True)
    longest = 0
    decode = tokenizer.decode

    def watched(ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(ids, skip_special_tokens=skip_special_tokens)

    tokenizer.decode = watched  # type: ignore[method-assign]
    text = "".join(detokenizer.push([byte]) for byte in b"\xe2\x82" * 200)
    text += "".join(detokenizer.push([EOS]) for _ in range(200)) + detokenizer.flush()
    assert text == "\ufffd" * 200
    assert longest <= 8


def test_the_text_of_invalid_bytes_does_not_depend_on_the_step() -> None:
    """Bug: a decoder of byte tokens replaces a whole run of them if one is invalid, so the text
    depended on how many came in one step: on speculation, and on where a reply went on."""
    tokenizer, random_ = PieceTokenizer(), random.Random(3)
    tokens = [1 + byte for byte in b"AB\xff\xe2\x82\xac\xc3\xa9"] + [257, 258, 260, 0]
    for _ in range(2000):
        ids = random_.choices(tokens, k=random_.randint(2, 9))
        alone = "".join(increments(tokenizer, [[i] for i in ids]))
        assert "".join(increments(tokenizer, list(splits(ids, random_)))) == alone, ids


def test_neighbours_decide_the_leading_space() -> None:
    """Law: increments equal the decode of all ids with SentencePiece's leading spaces, too."""
    tokenizer = PieceTokenizer()
    random_ = random.Random(2)
    euro = [1 + byte for byte in "€".encode()]
    words = [[258], [259], [260], [257], [261], [262], [263], [0], euro]
    for _ in range(2000):
        ids = [token for word in random_.choices(words, k=random_.randint(1, 8)) for token in word]
        parts = increments(tokenizer, list(splits(ids, random_)))
        assert "".join(parts) == tokenizer.decode(ids, skip_special_tokens=True), ids


def test_emitted_text_is_not_rewritten() -> None:
    """Law: emitted text stays, and the rest is decoded on its own, although a byte-fallback decoder
    turns a whole run into U+FFFD when one byte of it is invalid."""
    parts = increments(PieceTokenizer(), [[1 + byte for byte in "€".encode()], [1 + 0xFF], [258]])
    assert "".join(parts) == "€\ufffd the"


def test_nothing_in_nothing_out() -> None:
    """Law: without ids there is no text."""
    assert increments(ByteTokenizer(), []) == [""]
    assert increments(ByteTokenizer(), [[], [EOS], []]) == ["", "", "", ""]


def reference(text: str, stops: Sequence[str], include: bool) -> tuple[str, str | None]:
    """Return text and hit: the first place where a stop completes, and the longest one there."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            stop = max(done, key=len)
            return (text[:end] if include else text[: end - len(stop)]), stop
    return text, None


STOPS: list[list[str]] = [
    [],
    ["ab"],
    ["aab", "ab"],
    ["a", "ab"],  # one is a prefix of another
    ["b", "abc"],  # one lies within another
    ["aba"],  # overlaps itself
    ["bca", "cab", "aa"],  # overlap one another
    ["€", "\n\n", "abcab"],
]


@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("stops", STOPS)
def test_stop_strings_do_not_depend_on_splits(stops: list[str], include: bool) -> None:
    """Law: text and hit equal the character-by-character reference, however the text is split."""
    random_ = random.Random(repr(stops))
    for _ in range(1500):
        text = "".join(random_.choices("aabbc€\n", k=random_.randint(0, 14)))
        finder = StopStrings(stops, include=include)
        out, at = "", 0
        while at < len(text):
            size = random_.randint(0, 4)
            out += finder.push(text[at : at + size])
            at += size
        out += finder.flush()
        assert (out, finder.hit) == reference(text, stops, include), text


def test_holds_back_no_more_than_a_possible_stop() -> None:
    """Law: text that cannot become a stop string is emitted at once; the rest comes with flush."""
    finder = StopStrings(["END", "</s>"], include=False)
    assert finder.push("abcE") == "abc"
    assert finder.push("N") == ""
    assert finder.push("x<") == "ENx"
    assert finder.flush() == "<"
    assert finder.hit is None


def test_nothing_is_emitted_after_a_hit() -> None:
    """Law: a hit ends the text; what the engine generated beyond it is never shown."""
    finder = StopStrings(["stop"], include=False)
    assert finder.push("a st") == "a "
    assert finder.push("op and more") == ""
    assert finder.hit == "stop"
    assert finder.push("tail") == ""
    assert finder.flush() == ""


def test_no_stops_passes_everything() -> None:
    """Law: without stop strings nothing is held back."""
    finder = StopStrings([], include=False)
    assert finder.push("any") == "any"
    assert finder.flush() == ""


def test_an_empty_stop_string_is_a_bug_of_the_caller() -> None:
    """Law: an empty stop string is a bug in the caller, since the API refuses it."""
    with pytest.raises(AssertionError):
        StopStrings([""], include=False)
