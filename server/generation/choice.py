"""Choice: the text of one engine request, with its detokenizer, stop strings, usage,
log-probabilities and provenance.

The token that ended the sequence (EOS or one of stop_token_ids) is counted, but it has text and a
logprobs entry only with `include_stop`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Literal

from engine.errors import EngineLost
from engine.messages import Output, TokenLogprobs
from server.engine.mailbox import Stream
from server.errors import GenerationFailed
from server.generation.annotations import Provenance, TextLogprobs, TokenOrigin
from server.generation.generation_spec import GenerationSpec
from server.generation.usage import Usage
from server.text.detokenizer import Detokenizer, StopStrings
from server.text.reasoning import ThinkingSplitter
from server.text.tokenizer import Tokenizer

Finish = Literal["stop", "length"]


@dataclass(slots=True)  # not frozen: creation would take three times as long, once per token
class Delta:
    """New final output of one choice. The last one of a choice has `finish`."""

    index: int
    text: str
    logprobs: list[TextLogprobs] | None
    finish: Finish | None
    # Counted since the last Delta, even if their text is held back; None: not asked for.
    tokens: Sequence[int] | None = None
    provenance: list[TokenOrigin] | None = None
    known: bool = False  # the client already has everything but the finish


class Choice:
    """One choice of a reply. `skipped`: its text that the client already has."""

    def __init__(
        self, index: int, stream: Stream, *, spec: GenerationSpec, tokenizer: Tokenizer
    ) -> None:
        params = stream.original.params
        self.index = index
        self.stream = stream
        self.finish: Finish | None = None
        self.usage = Usage()
        self.prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
        self._spec = spec
        self._min_tokens = params.min_tokens
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(
            tokenizer,
            skip_special_tokens=spec.skip_special_tokens,
            shown=spec.shown_tokens,
            after=stream.original.prompt if spec.continues else (),
        )
        self._splitter = ThinkingSplitter(spec.thinking) if spec.thinking is not None else None
        self._undecided = 0  # tokens that may turn out to be thinking
        self._stops = StopStrings(spec.stop, include=spec.include_stop) if spec.stop else None
        self._logprob = 0.0  # sum over the counted tokens
        self._echo = None if spec.echoes is None else spec.echoes[index // spec.fan_out]
        self._provenance = Provenance() if params.provenance else None
        self._logprobs: list[TextLogprobs] = []  # whose text is not emitted yet
        self._position = 0  # characters decoded so far
        self._emitted = 0  # characters emitted so far
        self._resumes = bool(spec.begun)
        self.skipped = self._skip(spec.begun) if spec.begun else ""

    def _skip(self, tokens: Sequence[int]) -> str:
        """Process the tokens of the reply that the client already has. Return their text."""
        text = self._take(Output(id=self.stream.id, tokens=list(tokens)))
        self._position = self._emitted = len(text)
        return text

    def feed(self, output: Output) -> Delta | None:
        """Process one Output. Returns None if nothing new became final.

        Raises GenerationFailed for an error of this sequence, EngineLost if the engine ended it.
        """
        if output.finish == "error":
            sentence = output.error or "the engine refused the sequence"
            raise GenerationFailed(sentence, bad_request=output.bad_request)
        if output.finish == "abort":
            raise EngineLost("the engine ended this request before it was finished")
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        before = self.usage.completion_tokens
        text = self._begin(output) + self._take(output)
        tokens = output.tokens[: self.usage.completion_tokens - before]
        self.usage.take(self.stream.steps or (output,), len(tokens), stopped=self._hit)
        if output.logprobs is not None:
            self._logprob += sum(entry.logprob for entry in output.logprobs[: len(tokens)])
        known = self._resumes and not tokens  # the reply was complete already
        self._resumes = False
        if output.finish is not None and not (self._hit or known):
            text += self._tail()
        if output.finish is not None or self._hit:
            self.finish = "length" if output.finish == "length" and not self._hit else "stop"
        self._emitted += len(text)
        logprobs = None
        if self._logprobs or (output.logprobs is not None and self._spec.show_logprobs):
            logprobs = self._release()
        shown = tokens if self._spec.show_tokens else None
        provenance = self._origins()
        if not (text or logprobs or shown or provenance or self.finish):
            return None
        return Delta(self.index, text, logprobs, self.finish, shown, provenance, known)

    @property
    def mean_logprob(self) -> float:
        """Return the mean log-probability per counted token under the model itself; 0 without
        tokens, or if the engine sent no log-probabilities."""
        return self._logprob / max(self.usage.completion_tokens, 1)

    @property
    def stopped_by(self) -> str | None:
        """Return the stop string that was found, or None."""
        return None if self._stops is None else self._stops.hit

    @property
    def _hit(self) -> bool:
        return self.stopped_by is not None

    def _begin(self, output: Output) -> str:
        """Return the echoed prompt, once, and record its logprobs if they were requested."""
        if self._echo is None:
            return ""
        echo, self._echo = self._echo, None
        self._position = len(echo.text)
        entries = output.prompt_logprobs if echo.alternatives is not None else None
        if entries is not None:
            offsets = echo.places or echo.positions(self._tokenizer)
            for token, entry, offset in zip(echo.tokens, entries, offsets, strict=True):
                new = TextLogprobs(self._tokenizer, token, entry, offset, echo.alternatives)
                self._logprobs.append(new)
        return echo.text

    def _take(self, output: Output) -> str:
        """Return the new final text of generated tokens. They are decoded one by one if their
        count or positions matter."""
        if self._hit:
            return ""
        tokens = output.tokens
        ended = output.stop_token is not None and not self._spec.include_stop
        visible = tokens[:-1] if ended and tokens else tokens
        logprobs = output.logprobs if self._spec.show_logprobs else None
        alone = self._splitter is not None and not self._splitter.is_over
        alone |= self._stops is not None or logprobs is not None or self._provenance is not None
        if not alone:
            self.usage.completion_tokens += len(tokens)
            return self._detokenizer.push(visible)
        text = ""
        sources = [name for name, count in output.sources or () for name in repeat(name, count)]
        for i, token in enumerate(visible):
            at = self._position
            piece, thought = self._detokenizer.push([token]), self._thinks
            if self._provenance is not None:
                self._provenance.add(sources[i], piece, position=at)
            text += self._push(piece, self.usage.completion_tokens + 1)
            thought = self._count(thought=thought or self._thinks)
            if logprobs is not None:
                one = TextLogprobs(self._tokenizer, token, logprobs[i], at, thinking=thought)
                self._logprobs.append(one)
            if self._hit:
                return text
        self.usage.completion_tokens += len(tokens) - len(visible)
        return text

    def _count(self, *, thought: bool) -> bool:
        """Count one token. Return whether it is thinking, or may be, as the start of a mark."""
        self.usage.completion_tokens += 1
        if self._splitter is not None and self._splitter.is_undecided:
            self._undecided += 1
            return True
        self.usage.reasoning_tokens += (self._undecided + 1) * thought
        self._undecided = 0
        return thought

    @property
    def _thinks(self) -> bool:
        return self._splitter is not None and self._splitter.inside

    def _push(self, piece: str, num_tokens: int, *, last: bool = False) -> str:
        """Return the final text of a piece. Stop strings do not apply to thinking."""
        self._position += len(piece)
        parts = [(piece, False)]
        if self._splitter is not None:
            parts = self._splitter.push(piece, last=last)
        if self._stops is None:
            return piece
        text = ""
        for part, thinking in parts:
            if self._hit:
                break
            if thinking:
                text += self._stops.flush() + part
            elif num_tokens < self._min_tokens:
                text += part
            else:
                text += self._stops.push(part)
        return text

    def _tail(self) -> str:
        rest = self._detokenizer.flush()
        if self._provenance is not None:
            self._provenance.append(rest)
        text = self._push(rest, self.usage.completion_tokens, last=True)
        return text if self._stops is None or self._hit else text + self._stops.flush()

    def _release(self) -> list[TextLogprobs]:
        """Return the logprob entries whose text was emitted. Without stop strings, return all; at
        the end as well, unless a stop string cut off the rest."""
        held = self._logprobs
        size = len(held)
        if self._stops is not None and (self.finish is None or self._hit):
            size = next((i for i, each in enumerate(held) if each.offset >= self._emitted), size)
        self._logprobs = held[size:]
        return held[:size]

    def _origins(self) -> list[TokenOrigin] | None:
        if self._provenance is None:
            return None
        if self.finish is not None:
            return self._provenance.end(self._emitted, cut=self._hit)
        return self._provenance.release(self._emitted, incomplete=self._detokenizer.incomplete)
