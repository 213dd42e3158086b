"""Choice: one engine request seen as text. Owns its detokenizer, stop strings, counts
(`usage`), logprobs (`logprobs`) and provenance.

Text rule: the token that ended the sequence (EOS or one of stop_token_ids) has no text and no
logprobs entry unless `include_stop`, but it is counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Literal

from engine.errors import EngineLost
from engine.messages import Output, TokenLogprobs
from server.engine.mailbox import Stream
from server.errors import GenerationFailed
from server.generation.annotations import HeldLogprobs, Origin, Provenance, TextLogprobs
from server.generation.generation_spec import Echo
from server.generation.usage import Counts
from server.text.detokenizer import Detokenizer, StopStrings
from server.text.tokenizer import Tokenizer

Finish = Literal["stop", "length"]


@dataclass(slots=True)  # making a frozen one takes thrice as long, and this is one per token
class Delta:
    """What became certain of one choice. The last one of a choice has `finish`."""

    index: int
    text: str
    logprobs: list[TextLogprobs] | None
    finish: Finish | None
    tokens: Sequence[int] = ()  # counted since the last one, whether or not their text is out
    provenance: list[Origin] | None = None


class Choice:
    """`show_logprobs`: whether those of generated tokens are for the reader, should they come."""

    def __init__(
        self,
        index: int,
        stream: Stream,
        *,
        tokenizer: Tokenizer,
        stop: tuple[str, ...],
        include_stop: bool,
        skip_special_tokens: bool,
        shown_tokens: frozenset[int] = frozenset(),
        min_tokens: int = 0,
        echo: Echo | None = None,
        show_logprobs: bool = True,
        show_tokens: bool = False,
        provenance: bool = False,
    ) -> None:
        self.index = index
        self.stream = stream
        self.finish: Finish | None = None
        self.counts = Counts()
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(
            tokenizer, skip_special_tokens=skip_special_tokens, shown=shown_tokens
        )
        self._stops = StopStrings(stop, include=include_stop) if stop else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self.prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
        self._logprob = 0.0  # sum over the counted tokens
        self._echo = echo
        self._show_logprobs = show_logprobs
        self._show_tokens = show_tokens
        self._provenance = Provenance() if provenance else None
        self._held = HeldLogprobs(tokenizer)
        self._position = 0  # characters decoded so far
        self._emitted = 0  # characters handed out so far
        self._closed = False

    def close(self) -> bool:
        """Whether the engine still had it open; from now on nobody reads it."""
        was_open, self._closed = not self._closed, True
        return was_open

    def feed(self, output: Output) -> Delta | None:
        """Take one Output in; None if nothing became certain.

        Raises GenerationFailed for an error of this sequence, EngineLost if the engine ended it.
        """
        self._closed = output.finish is not None
        if output.finish == "error":
            sentence = output.error or "the engine refused the sequence"
            raise GenerationFailed(sentence, bad_request=output.bad_request)
        if output.finish == "abort":
            raise EngineLost("the engine ended this request before it was finished")
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        before = self.counts.tokens
        text = self._begin(output) + self._take(output)
        tokens = output.tokens[: self.counts.tokens - before]
        self.counts.take(output, self.stream.steps, len(tokens), stopped=self._hit)
        if output.logprobs is not None:
            self._logprob += sum(entry.logprob for entry in output.logprobs[: len(tokens)])
        if output.finish is not None and not self._hit:
            text += self._tail()
        if output.finish is not None or self._hit:
            self.finish = "length" if output.finish == "length" and not self._hit else "stop"
            self._closed = self._closed or self._hit
        self._emitted += len(text)
        logprobs = self._release(asked=output.logprobs is not None and self._show_logprobs)
        shown = tokens if self._show_tokens else ()
        provenance = self._origins()
        if not (text or logprobs or shown or provenance or self.finish):
            return None
        return Delta(self.index, text, logprobs, self.finish, shown, provenance)

    @property
    def mean_logprob(self) -> float:
        """Per counted token, under the model itself, if the engine was asked for log-probabilities.
        Without a token it is 0."""
        return self._logprob / max(self.counts.tokens, 1)

    @property
    def _hit(self) -> bool:
        return self._stops is not None and self._stops.hit is not None

    def _begin(self, output: Output) -> str:
        """The echoed prompt, once, with its logprobs when the first Output brings them."""
        if self._echo is None:
            return ""
        echo, self._echo = self._echo, None
        if output.prompt_logprobs is not None and echo.alternatives is not None:
            positions = echo.positions(self._tokenizer)
            scored = zip(echo.tokens, output.prompt_logprobs, positions, strict=True)
            for token, entry, at in scored:
                if entry is not None:
                    top = entry.top[: echo.alternatives]
                    entry = TokenLogprobs(token, entry.logprob, top, entry.rank)
                self._held.add(token, entry, position=at)
        self._position = len(echo.text)
        return echo.text

    def _take(self, output: Output) -> str:
        """Text of the generated tokens that became certain. One by one where the count of tokens
        or their places matter."""
        tokens = output.tokens
        ended = output.stop_token is not None and not self._include_stop
        visible = tokens[:-1] if ended and tokens else tokens
        logprobs = output.logprobs if self._show_logprobs else None
        if self._stops is None and logprobs is None and self._provenance is None:
            self.counts.tokens += len(tokens)
            return self._detokenizer.push(visible)
        text = ""
        sources = _each(output.sources) if self._provenance is not None else None
        for i, token in enumerate(visible):
            if logprobs is not None:
                self._held.add(token, logprobs[i], position=self._position)
            piece = self._detokenizer.push([token])
            if self._provenance is not None and sources is not None:
                self._provenance.add(next(sources), piece, position=self._position)
            text += self._push(piece, self.counts.tokens + 1)
            self.counts.tokens += 1
            if self._hit:
                return text
        self.counts.tokens += len(tokens) - len(visible)
        return text

    def _push(self, piece: str, num_tokens: int) -> str:
        self._position += len(piece)
        if self._stops is None or num_tokens < self._min_tokens:
            return piece
        return self._stops.push(piece)

    def _tail(self) -> str:
        rest = self._detokenizer.flush()
        if self._provenance is not None:
            self._provenance.append(rest)
        text = self._push(rest, self.counts.tokens)
        return text if self._stops is None or self._hit else text + self._stops.flush()

    def _release(self, *, asked: bool) -> list[TextLogprobs] | None:
        """Entries whose text is out; at the end the rest too, unless a stop string cut it off."""
        if not (asked or self._held):
            return None
        if self._stops is None or (self.finish is not None and not self._hit):
            return self._held.release_all()
        return self._held.release(self._emitted)

    def _origins(self) -> list[Origin] | None:
        if self._provenance is None:
            return None
        if self.finish is not None:
            return self._provenance.end(self._emitted, cut=self._hit)
        return self._provenance.release(self._emitted, incomplete=self._detokenizer.incomplete)


def _each(runs: list[tuple[str, int]] | None) -> Iterator[str]:
    """Who guessed each token; an engine that was asked says it of all of them."""
    assert runs is not None
    return chain.from_iterable(repeat(source, count) for source, count in runs)
