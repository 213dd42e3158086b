"""`python -m engine.grammar_check PATH`: a child of the front end that says whether grammars can be
honoured. It compiles what users send, so it may hang, swell or crash, and is killed for it.

stdin: Grammar messages; stdout: one answer each, "" or a sentence; first of all one about the
tokenizer. Every message is msgpack behind four bytes of length. It also kills itself: by a timer
when a grammar takes too long and nobody else did, by a memory limit, with its parent.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import resource
import signal
import struct
import sys
import threading
from pathlib import Path
from typing import BinaryIO

import msgspec
from llguidance import LLTokenizer

from engine.errors import ModelError
from engine.messages import Grammar
from engine.sampling.grammar_probe import probe
from engine.sampling.grammar_source import GrammarRefused, compile_grammar
from engine.sampling.vocabulary import load_vocabulary

STACK_BYTES = 2 * 2**20  # less than the engine's, so that what is deep fails here
MEMORY_BYTES = 2**30  # address space beyond what the vocabulary took
_PR_SET_PDEATHSIG = 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.grammar_check")
    parser.add_argument("path")
    parser.add_argument("--revision")
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--seconds", type=float, required=True, help="it ends itself after that")
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to handle
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # whatever a library prints must not look like an answer
    try:
        vocabulary = load_vocabulary(
            args.path, revision=args.revision, trust_remote_code=args.trust_remote_code
        )
    except ModelError as error:
        _write(answers, str(error))
        return 0
    _limit_memory()
    _write(answers, "")
    while (data := _read(sys.stdin.buffer)) is not None:
        grammar = msgspec.msgpack.decode(data, type=Grammar)
        signal.setitimer(signal.ITIMER_REAL, args.seconds)
        answer = verdict(grammar, vocabulary)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _write(answers, answer)
    return 0


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


def _limit_memory() -> None:
    if sys.platform != "linux":
        return
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (most if hard < 0 else min(most, hard), hard))


def _read(stream: BinaryIO) -> bytes | None:
    """One message; None at the end of the stream."""
    head = stream.read(4)
    return stream.read(struct.unpack("<I", head)[0]) if len(head) == 4 else None


def _write(stream: BinaryIO, answer: str) -> None:
    data = msgspec.msgpack.encode(answer)
    stream.write(struct.pack("<I", len(data)) + data)


if __name__ == "__main__":
    sys.exit(main())
