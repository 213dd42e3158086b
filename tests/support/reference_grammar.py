"""The plain reference under a grammar: a fresh matcher for every token, fed from the first token.

No rollback, no cache, no saved masks, and a vocabulary that llguidance reads from the tokenizer's
own file. The masks are llguidance's; everything around them is independent of the engine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from engine.messages import Grammar, SamplingParams
from tests.support.reference import Reference, log_softmax

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

STYLE: JsonCompileOptions = {
    "whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ",
    "json_allowed_escapes": "\"\\bfnrt",
}  # fmt: skip


class GrammarReference(Reference):
    """`tokenizer`: the text of a tokenizer.json; `vocab_size`: columns of the logits."""

    def __init__(
        self, path: str, eos_ids: Sequence[int], *, tokenizer: str, vocab_size: int
    ) -> None:
        super().__init__(path, eos_ids)
        self._eos = list(eos_ids)
        self._vocabulary = LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=self._eos)

    def generate(
        self, prompt: Sequence[int], params: SamplingParams
    ) -> tuple[list[int], list[float]]:
        if params.grammar is None:
            return super().generate(prompt, params)
        output, logprobs = list[int](), list[float]()
        stops = {*params.stop_token_ids, *(() if params.ignore_eos else self._eos)}
        while len(output) < params.max_tokens:
            allowed = self.allowed(params.grammar, output)
            if not np.delete(allowed, self._eos).any():
                break
            if params.ignore_eos:
                allowed[self._eos] = False
            raw = self.logits([*prompt, *output])[-1]
            token = self.draw(np.where(allowed, raw, -np.inf), params, prompt, output)
            output.append(token)
            logprobs.append(float(log_softmax(raw)[token]))
            if token in stops:
                break
        return output, logprobs

    def allowed(self, grammar: Grammar, output: Sequence[int]) -> npt.NDArray[np.bool_]:
        matcher = LLMatcher(self._vocabulary, compiled(grammar))
        for token in output:
            assert matcher.consume_token(token), matcher.get_error()
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        width = self._vocabulary.vocab_size
        return np.unpackbits(bits, count=width, bitorder="little").astype(np.bool_)


def compiled(grammar: Grammar) -> str:
    """Convert the grammar to llguidance's format, by hand."""
    text = _reply(grammar)
    if not grammar.lead:
        return text
    reply = json.loads(text)["grammars"][0] if text[0] == "{" else {"lark_grammar": text}
    return json.dumps({"grammars": [{"lark_grammar": grammar.lead}, {**reply, "name": "reply"}]})


def _reply(grammar: Grammar) -> str:
    match grammar.kind:
        case "json_object":
            return LLMatcher.grammar_from_json_schema('{"type": "object"}', overrides=STYLE)
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(grammar.source, overrides=STYLE)
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.source)
        case "choice":
            choices = [json.dumps(choice) for choice in json.loads(grammar.source)]
            return "start: " + " | ".join(choices)
        case "lark":  # here a schema is always the last thing on its line
            return re.sub(r"(?<=%json )\{.*\}$", _styled, grammar.source, flags=re.MULTILINE)


def _styled(schema: re.Match[str]) -> str:
    return json.dumps({**json.loads(schema[0]), "x-guidance": STYLE})
