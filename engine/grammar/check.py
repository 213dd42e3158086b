"""`python -m engine.grammar.check PATH`: a child of the front end that says whether grammars can be
honoured. It reads the tokenizer once; what compiles a grammar is a fork of it (grammar_children).

stdin: [id, Grammar]; stdout: [id, sentence, final], "" for a grammar that can be honoured, in any
order; the first one, with id 0, is about the tokenizer. Every message is msgpack behind four bytes
of length. It ends with its stdin or its parent.
"""

from __future__ import annotations

import gc
import os
import selectors
import signal
import struct
import sys
import threading

import msgspec
from llguidance import LLTokenizer

from engine.arguments import Parser, number
from engine.child.parent import die_with_parent
from engine.errors import ModelError
from engine.grammar.children import Children
from engine.grammar.probe import probe
from engine.grammar.source import GrammarRefused, compile_grammar
from engine.grammar.vocabulary import load_vocabulary
from engine.messages import CheckOutcome, Grammar

STACK_BYTES = 2 * 2**20  # less than the engine's, so that what is deep fails here
_CHUNK = 2**20


def main() -> int:
    parser = Parser(prog="python -m engine.grammar.check")
    parser.add_argument("path")
    parser.add_argument("--revision")
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument(
        "--seconds", type=number(0, above=True), required=True, help="CPU time of a grammar"
    )
    args = parser.parse_args()
    for each in (signal.SIGINT, signal.SIGTERM):  # the parent's to handle, which may need this
        signal.signal(each, signal.SIG_IGN)
    die_with_parent()
    answers = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints must not look like an answer
    try:
        vocabulary = load_vocabulary(
            args.path, revision=args.revision, trust_remote_code=args.trust_remote_code
        )
    except ModelError as error:
        _write(answers, 0, str(error), "refused")
        return 0
    gc.collect()
    gc.freeze()  # so that children share these pages
    _write(answers, 0, "", "accepted")
    _serve(vocabulary, answers, args.seconds)
    return 0


def _serve(vocabulary: LLTokenizer, answers: int, seconds: float) -> None:
    """Answer requests until stdin ends."""
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    children = Children(
        lambda grammar: verdict(grammar, vocabulary),
        lambda id, sentence, outcome: _write(answers, id, sentence, outcome),
        seconds=seconds,
        selector=selector,
    )
    received = bytearray()
    while True:
        for key, _ in selector.select(children.look()):
            if key.fd:
                children.read(key.fd)
                continue
            data = os.read(0, _CHUNK)
            if not data:
                return
            received += data
            while (asked := _take(received)) is not None:
                children.add(*asked)


def verdict(grammar: Grammar, vocabulary: LLTokenizer) -> str:
    """Empty when the grammar can be honoured, else one sentence. Deep recursion in the library
    overflows the stack and ends the process."""
    answers: list[str] = []

    def work() -> None:
        try:
            probe(compile_grammar(grammar, vocabulary), vocabulary)
        except GrammarRefused as error:
            answers.append(str(error))
        else:
            answers.append("")

    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return answers[0] if answers else "the grammar compiler failed on it"


def _take(received: bytearray) -> tuple[int, Grammar] | None:
    """The first whole message, which is removed; None if there is none."""
    if len(received) < 4:
        return None
    end = 4 + struct.unpack_from("<I", received)[0]
    if len(received) < end:
        return None
    data = bytes(received[4:end])
    del received[:end]
    return msgspec.msgpack.decode(data, type=tuple[int, Grammar])


def _write(answers: int, id: int, sentence: str, outcome: CheckOutcome) -> None:
    data = msgspec.msgpack.encode((id, sentence, outcome))
    data = struct.pack("<I", len(data)) + data
    while data:
        data = data[os.write(answers, data) :]


if __name__ == "__main__":
    sys.exit(main())
