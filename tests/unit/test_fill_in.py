"""Fill in the middle: the special tokens of models that support it, and their prompts."""

from __future__ import annotations

import pytest

from server.text.tokenizer import SPELLINGS, find_fill_in


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_each_spelling_is_found(spelling: tuple[str, str, str]) -> None:
    """Law: all three tokens, in the order prefix, suffix, middle; each also ends the text."""
    ids = dict(zip(spelling, (10, 20, 30), strict=True)) | {"<|endoftext|>": 1, "<|file_sep|>": 2}
    found = find_fill_in(ids.get)
    assert found is not None
    assert found.prompt([5, 6], [7]) == [10, 5, 6, 20, 7, 30]
    assert set(found.ends) == {10, 20, 30, 1, 2}


def test_all_three_tokens_are_needed() -> None:
    """Law: a vocabulary that lacks one of the tokens does not support it."""
    for spelling in SPELLINGS:
        assert find_fill_in(dict.fromkeys(spelling[:2], 1).get) is None
    assert find_fill_in(lambda text: None) is None
