"""The bytes that a vocabulary's spelling of a token stands for."""

from __future__ import annotations

import re


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte (`bytes_to_unicode`, openai/gpt-2 encoder.py)."""
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(shown)]
    return {chr(b): b for b in shown} | {chr(256 + i): b for i, b in enumerate(hidden)}


_ALPHABET = byte_alphabet()
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_level_bytes(piece: str) -> bytes:
    """Bytes of a GPT-2 style token; a piece outside the alphabet is plain text."""
    if all(char in _ALPHABET for char in piece):
        return bytes(_ALPHABET[char] for char in piece)
    return piece.encode("utf-8")


def text_piece_bytes(piece: str) -> bytes:
    """Bytes of a SentencePiece, byte-fallback or WordPiece token."""
    if found := _BYTE_TOKEN.fullmatch(piece):
        return bytes([int(found[1], 16)])
    return piece.removeprefix("##").replace("\u2581", " ").encode("utf-8")
