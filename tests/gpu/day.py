"""`python -m tests.gpu.day --output DIR`: run all GPU tests and benchmarks in one command
(`make gpu`).

Tests the CUDA path (tests/gpu), then measures it, the most important parts first. Each part is a
separate process with a time limit, so that one that fails or hangs does not affect the others. All
results so far are written after each part: `gpu_day.json`, and `gpu_day.md` for people.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from engine.arguments import Parser, exit_code, names_of, number
from engine.errors import ConfigError
from engine.lab.files import write_json, write_text

ROOT = Path(__file__).parents[2]
TESTS = ("attention", "fused", "engine_on", "graphs", "sampling", "packed_copy", "memory")
KINDS = ("tests", "failures", "errors", "skipped")  # counts in a JUnit report
FORWARDS = {
    "triton": "--attention triton", "invariant": "--batch-invariant",
    "int8": "--quantization int8", "int4": "--quantization int4", "fp8": "--quantization fp8",
    "sdpa": "--attention sdpa",
}  # fmt: skip
MINUTES, BENCH_SHARE = 25.0, 0.06  # for all parts, and the share of it for each bench
SHOWN = 100  # last lines of a part's output that the page shows
Found = dict[str, Any]  # results by part


@dataclass(frozen=True, slots=True)
class Job:
    """A part of the day. `words`: arguments of the Python process that runs it; `limit`: seconds.
    It may write its results to a file `NAME.json` or `NAME.xml`."""

    name: str
    question: str
    limit: float
    words: tuple[str, ...]


@dataclass(slots=True)
class Outcome:
    """How a part ended. `code`: exit code, None after a timeout. `output`: stdout and stderr."""

    name: str
    question: str
    code: int | None
    seconds: float
    output: str = field(repr=False)


def parts_of(
    folder: Path, device: str, parameters: str, *, quick: bool, minutes: float = MINUTES
) -> Iterator[Job]:
    """Yield the parts in order. `quick`: only enough to show that they run; `minutes`: of all."""
    pair, few = folder / "pair", ("--tokens", "128") if quick else ()
    ours = ("--target", str(pair / "target"), "--draft", str(pair / "draft"), "--device", device)
    long = "--rounds 1 --tokens 16" if quick else f"--rounds 2 --minutes {BENCH_SHARE * minutes}"
    greedy = ("--kinds", "random", "--temperatures", "0", *long.split())

    def part(name: str, question: str, limit: float, words: str, *more: str) -> Job:
        return Job(name, question, limit, ("-m", *words.split(), *more))

    def figures(name: str, question: str, limit: float, words: str, *more: str) -> Job:
        file = folder / f"{name}.json"
        return part(name, question, limit, words, *more, *ours, "--json", str(file))

    for name in TESTS:
        file = f"tests/gpu/test_{name}_cuda.py"
        yield part(name, f"does {file} hold?", 200, f"pytest {file} -rfEs --tb=short",
                   f"--junitxml={folder / name}.xml")  # fmt: skip
    made = f"engine.lab.synthetic --parameters {parameters} --acceptance 0.8 --device {device}"
    yield part("pair", "a random pair that agrees in four of five tokens", 150,
               made, "--output", str(pair), *few)  # fmt: skip
    yield figures("machine", "what do forwards cost, and what does K gain?", 240,
                  "engine.lab.bench machine --modes off,3,5", *greedy)  # fmt: skip
    yield figures("streams", "what does speculation gain at 1 to 64 streams?", 300,
                  "engine.lab.bench --modes off,4,auto --concurrency 1,4,16,64",
                  *greedy)  # fmt: skip
    yield figures("transformers", "is it faster than transformers' own generation?", 240,
                  "engine.lab.bench --modes off,4,transformers,assisted --concurrency 1",
                  *greedy)  # fmt: skip
    yield figures("host", "what does the host add to a step?", 120,
                  "engine.lab.bench host --modes off,4 --tokens 48 --concurrency 1,32,64",
                  "--rounds", "1" if quick else "2")  # fmt: skip
    for name, words in FORWARDS.items():
        if name != "sdpa" and device == "cpu":
            continue
        yield figures(f"forwards-{name}", f"what do forwards cost with {words}?", 150,
                      f"engine.lab.forwards {words}")  # fmt: skip


def run(part: Job, folder: Path, left: float) -> Outcome:
    """Run a part for at most `left` seconds, then kill its whole process group."""
    if left <= 0.0:
        return Outcome(part.name, part.question, None, 0.0, "")
    began, log = time.monotonic(), folder / f"{part.name}.txt"
    code = None
    with log.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, *part.words],
            stdout=stream, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        try:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(min(part.limit, left))
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    output = log.read_text(errors="replace")
    return Outcome(part.name, part.question, code, time.monotonic() - began, output)


def found_by(part: Job, folder: Path) -> Any:
    """Return a part's results: its JSON figures, or for tests the counts of KINDS; else None."""
    with suppress(OSError, ValueError):
        return json.loads((folder / f"{part.name}.json").read_text())
    with suppress(OSError, ElementTree.ParseError, StopIteration):
        suite = next(ElementTree.parse(folder / f"{part.name}.xml").iter("testsuite"))
        return {kind: int(suite.get(kind, 0)) for kind in KINDS}
    return None


def _ratio(cell: Any, mode: str, to: str) -> float:
    rates = {name: of["tokens_per_second"] for name, of in cell["modes"].items()}
    return float(rates[mode] / rates[to])


# Goals: name, direction, limit, and where the value is in the results.
WANTED: tuple[tuple[str, str, float, Callable[[Found], float]], ...] = (
    ("bytes read at K = 0, of those that a copy moves", ">=", 0.80,
     lambda f: f["machine"]["costs"]["read"] / f["machine"]["costs"]["copy"]),
    ("a forward of 8 rows, of one of 1 row", "<=", 1.10,
     lambda f: f["machine"]["costs"]["ratios"][7]),
    ("auto at 1 stream, of K = 0", ">=", 2.5,
     lambda f: _ratio(f["streams"]["cells"][0], "auto", "off")),
    ("auto at 1 to 64 streams, the least, of K = 0", ">=", 0.98,
     lambda f: min(_ratio(cell, "auto", "off") for cell in f["streams"]["cells"])),
    ("reached, of what the costs say is possible", ">=", 0.90,
     lambda f: max(p["reached"] / p["possible"] for p in f["machine"]["promises"])),
    ("K = 0, of transformers", ">=", 1.5,
     lambda f: _ratio(f["transformers"]["cells"][0], "off", "transformers")),
    ("K = 4, of transformers assisted", ">=", 1.5,
     lambda f: _ratio(f["transformers"]["cells"][0], "K=4", "assisted")),
)  # fmt: skip


def judged(found: Found) -> Iterator[tuple[str, float | None, str, bool | None]]:
    """Yield name, value, limit and whether it is met for each of `WANTED`; None: unknown."""
    for name, sense, limit, get in WANTED:
        value = None
        with suppress(KeyError, IndexError, TypeError, ValueError, ZeroDivisionError):
            value = get(found)
        met = None if value is None else value >= limit if sense == ">=" else value <= limit
        yield name, value, f"{sense} {limit:g}", met


def page(outcomes: Sequence[Outcome], found: Found) -> str:
    """Return the report as Markdown."""
    known = [of["facts"] for of in found.values() if of and "facts" in of]
    facts: dict[str, Any] = known[0] if known else {}
    lines = ["# The day of the GPU", "", ", ".join(f"{k}: {v}" for k, v in facts.items()), ""]
    lines += ["| wanted | measured | limit | met |", "| --- | --- | --- | --- |"]
    for name, value, limit, met in judged(found):
        shown = "-" if value is None else f"{value:.3f}"
        lines.append(f"| {name} | {shown} | {limit} | {_word(met)} |")
    lines += ["", "| part | question | exit code | seconds |", "| --- | --- | --- | --- |"]
    for each in outcomes:
        code = "time is over" if each.code is None else each.code
        tests = found.get(each.name) if each.name in TESTS else None
        if tests and tests.get("skipped"):
            code = f"{code}, {tests['skipped']} of {tests['tests']} tests skipped"
        lines.append(f"| {each.name} | {each.question} | {code} | {each.seconds:.0f} |")
    for each in outcomes:
        output = [line.rsplit("\r", 1)[-1] for line in each.output.split("\n")[-SHOWN:]]
        lines += ["", f"## {each.name}", "", "````", *output, "````"]
    return "\n".join(lines) + "\n"


def _word(met: bool | None) -> str:
    return "not known" if met is None else "yes" if met else "NO"


def _check_device() -> None:
    """Raise ConfigError if this Python finds no GPU."""
    program = "import torch; raise SystemExit(not torch.cuda.is_available())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        why = lines[0] if lines else "torch finds no GPU"
        raise ConfigError(f"{sys.executable}: {why}; --device cpu shows how far it goes without")


def day(parsed: argparse.Namespace) -> int:
    """Run all parts; return exit code 1 if one failed, else 0. Raises ConfigError."""
    if parsed.device == "cuda":
        _check_device()
    folder, ends = Path(parsed.output).resolve(), time.monotonic() + 60 * parsed.minutes
    folder.mkdir(parents=True)
    outcomes: list[Outcome] = []
    found: Found = {}
    parts = parts_of(
        folder, parsed.device, parsed.parameters, quick=parsed.quick, minutes=parsed.minutes
    )
    try:
        for part in parts:
            if parsed.only and part.name not in parsed.only:
                continue
            outcome = run(part, folder, ends - time.monotonic())
            outcomes.append(outcome)
            found[part.name] = found_by(part, folder)
            print(f"{part.name}: exit code {outcome.code}, {outcome.seconds:.0f} s", flush=True)
            kept = {"parts": [asdict(each) for each in outcomes], "found": found}
            write_json(folder / "gpu_day.json", {**kept, "judged": list(judged(found))})
            write_text(folder / "gpu_day.md", page(outcomes, found))
    finally:
        shutil.rmtree(folder / "pair", ignore_errors=True)  # 18 GB for an 8B target
    print(f"written: {folder / 'gpu_day.md'}")
    return 0 if all(each.code == 0 for each in outcomes) else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Return exit code 0, 1 if a part failed, or 2 for invalid arguments."""
    parser = Parser("python -m tests.gpu.day", __doc__)
    add = parser.add_argument
    add("--output", required=True, metavar="DIR", help="a folder that is not there yet")
    add("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: to see that it runs")
    add("--parameters", default="8b", metavar="N", help="of the target (8b)")
    add("--minutes", type=number(0, 600, above=True), default=MINUTES,
        help=f"in all ({MINUTES:g})")  # fmt: skip
    add("--quick", action="store_true", help="as little as shows that each part runs")
    names = [part.name for part in parts_of(Path(), "cuda", "8b", quick=True)]
    add("--only", type=names_of(names), help="parts, with commas between them")
    parsed = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # `run` then kills the running part
    return exit_code(parser.prog, lambda: day(parsed))


if __name__ == "__main__":
    sys.exit(main())
