"""One evaluation from its options to its reports."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, Protocol

from engine.config import (
    AdaptiveConfig,
    DraftModelConfig,
    EngineConfig,
    NgramConfig,
    check_folders,
    model_folder,
)
from engine.errors import ConfigError
from engine.lab.files import write_text
from engine.messages import Ready
from server.config import Config
from server.generation.structured import grammar_checker
from server.lab.evaluate.advice import advise, recommended
from server.lab.evaluate.child import Child
from server.lab.evaluate.config_file import config_text, with_speculation, write_config
from server.lab.evaluate.contenders import KS, contenders
from server.lab.evaluate.findings import Findings
from server.lab.evaluate.measure import Clock, Evaluation, Lab
from server.lab.evaluate.page import page
from server.lab.evaluate.prompts import Entry, read_prompts
from server.lab.evaluate.report import Report, as_json, card
from server.lab.evaluate.tasks import Task, TaskMaker, any_engine, check_bodies
from server.text.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line said. Of `html`, `json` and `config` those are written that are set."""

    prompts: Path
    seconds: float
    max_prompts: int
    max_tokens: int
    loads: Sequence[int]
    temperatures: Sequence[float]
    text_as: Literal["auto", "chat", "completion"] = "auto"
    seed: int = 0
    html: Path | None = None
    json: Path | None = None
    config: Path | None = None


class ReadyLab(Lab, Protocol):
    @property
    def ready(self) -> Ready: ...


OpenLab = Callable[[EngineConfig], AbstractContextManager[ReadyLab]]
LoadTokenizer = Callable[[Config], Tokenizer]


def run(
    config: Config,
    options: Options,
    *,
    open_lab: OpenLab = Child,
    load: LoadTokenizer | None = None,
    clock: Clock = time.perf_counter,
    out: Callable[[str], object] | None = None,
    say: Callable[[str], object] | None = None,
) -> bool:
    """Whether all texts stayed the same. Raises EngineError; then nothing was written."""
    speak = say or (lambda line: sys.stderr.write(f"{line}\n"))
    entries = read_prompts(options.prompts)
    check_bodies(entries, str(options.prompts))
    chosen = evenly(entries, options.max_prompts)
    engine, notes = evaluated(config.engine, options.loads)
    check_folders(engine)
    tokenizer = (load or _load_tokenizer)(config)
    # What only the engine knows, vocabulary and length, is checked once it is there.
    asyncio.run(_tasks(config, options, tokenizer, any_engine(config), chosen))
    speak(f"{len(chosen)} of {len(entries)} prompts; loading the models")
    with open_lab(engine) as lab:
        tasks = asyncio.run(_tasks(config, options, tokenizer, lab.ready, chosen))
        findings = Findings(
            facts(config, options, lab.ready, tasks, found=len(entries), chosen=len(chosen)),
            contenders(lab.ready, tasks),
            notes,
        )
        Evaluation(
            lab,
            tasks,
            findings,
            loads=options.loads,
            seconds=options.seconds,
            path=str(options.prompts),
            decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=False),
            clock=clock,
            say=speak,
        ).run()
    report_all(config, options, findings, out or sys.stdout.write)
    return findings.lossless


def evenly(entries: Sequence[Entry], count: int) -> list[Entry]:
    """So many, evenly spaced, in order."""
    size = min(count, len(entries))
    return [entries[i * len(entries) // size] for i in range(size)]


def evaluated(said: EngineConfig, loads: Sequence[int]) -> tuple[EngineConfig, list[str]]:
    """The engine to measure with: every K up to the largest compared, adaptive; no prefix cache,
    since prompts are repeated here; and notes about it. Raises ConfigError."""
    most = said.schedule.max_sequences
    if max(loads) > most:
        raise ConfigError(f"--concurrency {max(loads)} exceeds schedule.max_sequences = {most}")
    notes: list[str] = []
    proposer = said.speculation.proposer
    if proposer.kind == "none":
        proposer = NgramConfig()
        notes.append("the configuration has no guesses; n-gram lookup was tried")
    k_max = max(said.speculation.k_max, *KS)
    controller = AdaptiveConfig(k_max=k_max)
    speculation = said.speculation.model_copy(
        update={"proposer": proposer, "controller": controller, "trace": None}
    )
    cache = said.cache.model_copy(update={"prefix_caching": False})
    return said.model_copy(update={"speculation": speculation, "cache": cache}), notes


def facts(
    config: Config,
    options: Options,
    ready: Ready,
    tasks: Sequence[Task],
    *,
    found: int,
    chosen: int,
) -> dict[str, Any]:
    """What a reader needs to know to judge the figures."""
    proposer = config.engine.speculation.proposer
    kinds = Counter({task.entry.line: task.kind for task in tasks}.values())
    return {
        "prompts": options.prompts.name,
        "found": found,
        "chosen": chosen,
        "kinds": ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()),
        "target": config.engine.target.path,
        "draft": proposer.path if isinstance(proposer, DraftModelConfig) else None,
        "dtype": ready.dtype,
        "device": ready.device,
        "concurrency": list(options.loads),
        "temperatures": list(options.temperatures),
        "minutes": options.seconds / 60,
        "max_tokens": options.max_tokens,
        "seed": options.seed,
        "version": version("foredraft"),
        "date": date.today().isoformat(),
    }


def report_all(
    config: Config, options: Options, findings: Findings, out: Callable[[str], object]
) -> None:
    """The card, then the files. Raises ConfigError for one that cannot be written."""
    advice = advise(findings)
    best = with_speculation(config, recommended(config.engine, advice.overall))
    origin = f"foredraft evaluate, {findings.facts['date']}, {findings.facts['prompts']}"
    comments = [origin, *advice.reasons]
    report = Report(findings, advice, config_text(best, comments))
    out(f"{card(report)}\n")
    if options.config is not None:
        write_config(options.config, best, comments)
        out(f"Wrote {options.config}: foredraft serve {options.config}\n")
    else:
        out(f"\nConfiguration to use (--write-config FILE.toml):\n\n{config_text(best)}")
    for path, render in ((options.html, page), (options.json, as_json)):
        if path is not None:
            write_text(path, render(report))
            out(f"Wrote {path}\n")


def _load_tokenizer(config: Config) -> Tokenizer:
    target = config.engine.target
    return load_tokenizer(
        model_folder(target.path, "target"),
        revision=target.revision,
        trust_remote_code=target.trust_remote_code,
    )


async def _tasks(
    config: Config,
    options: Options,
    tokenizer: Tokenizer,
    ready: Ready,
    entries: Sequence[Entry],
) -> list[Task]:
    grammars = grammar_checker(config)
    maker = TaskMaker(
        config=config,
        tokenizer=tokenizer,
        grammars=grammars,
        ready=ready,
        path=str(options.prompts),
        temperatures=options.temperatures,
        max_tokens=options.max_tokens,
        chat=options.text_as == "chat"
        or (options.text_as == "auto" and tokenizer.has_chat_template),
        seed=options.seed,
    )
    try:
        for entry in entries:
            await maker.add(entry)
    finally:
        await grammars.close()
    return maker.tasks
