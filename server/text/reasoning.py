"""Reasoning: finds the thinking in a reply by the marks that the chat template writes around it,
and makes the grammar of the text up to its end.

A prompt may already open the thinking (DeepSeek-R1) or close it (Qwen3, when told not to think):
`of_prompt` returns the state in which a reply begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from server.config import ReasoningName
from server.text.detokenizer import partial_length
from server.text.markers import Marker, marker_of, text_up_to
from server.text.tokenizer import Tokenizer

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
CONSTRAIN, CALL, RETURN = "<|constrain|>", "<|call|>", "<|return|>"
HARMONY = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
TAIL_TOKENS = 32  # at the end of a prompt, enough to hold its last marks


@dataclass(frozen=True, slots=True)
class Style:
    """The marks that open and close the thinking, and all marks that a parser must see. `again`: it
    may be opened anywhere, and more than once."""

    opens: str
    closes: tuple[str, ...]
    marks: tuple[str, ...]
    again: bool = False


# Tried in this order.
STYLES: Mapping[ReasoningName, Style] = {
    "harmony": Style(
        f"{CHANNEL}analysis", (f"{CHANNEL}final", f"{CHANNEL}commentary"), HARMONY, again=True
    ),
    "mistral": Style("[THINK]", ("[/THINK]",), ("[THINK]", "[/THINK]")),
    "think": Style("<think>", ("</think>",), ("<think>", "</think>")),
}


@dataclass(frozen=True, slots=True)
class Thinking:
    """How a model marks thinking. `inside`: the reply begins within it, else it may open it."""

    style: Style
    markers: tuple[Marker, ...]
    inside: bool = False

    def of_prompt(self, end: str) -> Thinking | None:
        """Return the state after a prompt that ends so; None: the prompt closed the thinking."""
        end, style = end.rstrip().removesuffix(MESSAGE), self.style
        if end.endswith(style.closes):
            return None
        return replace(self, inside=end.endswith(style.opens))

    def lead(self, *, to_content: bool) -> str:
        """Return the grammar of the text before the constrained reply (`Grammar.lead`).
        `to_content`: that reply is content, so with channels it begins in the final one."""
        symbols = {marker.text: marker.symbol for marker in self.markers}
        if self.style.again:
            end = next(marker for marker in self.markers if marker.text == END)
            thought = f'text_marker {symbols[START]} "assistant"'
            opened = f'{symbols[CHANNEL]} "analysis" {symbols[MESSAGE]} {thought}'
            start = f"{thought} " if self.inside else ""
            start += f"({opened})*"
            if to_content:
                start += f' {symbols[CHANNEL]} "final" {symbols[MESSAGE]}'
        else:
            end, thought = self.markers[1], 'text_marker ("\\n\\n" | "\\n")?'
            start = thought if self.inside else f"({self.markers[0].symbol} {thought})?"
        return "\n".join([f"start: {start} @reply", *text_up_to(end)]) + "\n"


@lru_cache(maxsize=4)
def thinking_of(tokenizer: Tokenizer, parser: str) -> Thinking | None:
    """Return how the model marks its thinking; None: it does not. `parser`: a ReasoningName, "auto"
    or "none"."""
    for name, style in STYLES.items():
        has_marks = any(map(tokenizer.template_has, (style.opens, *style.closes)))
        if parser == name or (parser == "auto" and tokenizer.has_chat_template and has_marks):
            return Thinking(style, tuple(marker_of(tokenizer, text) for text in style.marks))
    return None


class ThinkingSplitter:
    """Splits a reply's text, as it arrives, into thinking, including its marks, and the rest."""

    def __init__(self, thinking: Thinking) -> None:
        self.inside = thinking.inside
        self.is_over = False  # whether no more thinking can come
        self._style = thinking.style
        self._held = ""  # text that may begin a mark

    @property
    def is_undecided(self) -> bool:
        """Whether the last text may turn out to begin the thinking."""
        return bool(self._held) and not self.inside

    def push(self, text: str, *, last: bool = False) -> list[tuple[str, bool]]:
        """Return the parts that became certain, and whether each is thinking."""
        parts: list[tuple[str, bool]] = []
        self._held += text
        while not self.is_over:
            marks = self._style.closes if self.inside else (self._style.opens,)
            if not (self.inside or self._style.again or self._may_open(marks[0])):
                self.is_over = True
                break
            found = [(at, mark) for mark in marks if (at := self._held.find(mark)) >= 0]
            if not found:
                keep = 0 if last else partial_length(self._held, marks)
                self._take(len(self._held) - keep, parts)
                return parts
            at, mark = min(found)
            self._take(at, parts)
            was_inside, self.inside = self.inside, True
            self._take(len(mark), parts)
            self.inside = not was_inside
            self.is_over = was_inside and not self._style.again
        self._take(len(self._held), parts)
        return parts

    def _may_open(self, mark: str) -> bool:
        start = self._held.lstrip()[: len(mark)]
        return mark.startswith(start)

    def _take(self, size: int, parts: list[tuple[str, bool]]) -> None:
        if size:
            parts.append((self._held[:size], self.inside))
        self._held = self._held[size:]
