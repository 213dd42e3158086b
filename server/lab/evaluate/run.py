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
from server.lab.evaluate.advice import advise
from server.lab.evaluate.child import Child
from server.lab.evaluate.config_file import config_text, write_config
from server.lab.evaluate.contenders import KS, contenders, recommended
from server.lab.evaluate.findings import Findings
from server.lab.evaluate.measure import Lab, Measurement
from server.lab.evaluate.page import page
from server.lab.evaluate.prompts import Entry, read_prompts
from server.lab.evaluate.report import Report, as_json, card
from server.lab.evaluate.tasks import Defaults, Task, any_engine, check_bodies, make_tasks
from server.text.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Of the command line, by its names. Of the last three those are written that are set."""

    prompts: Path
    minutes: float
    max_prompts: int
    max_tokens: int
    concurrency: Sequence[int]
    temperature: Sequence[float]
    text_as: Literal["auto", "chat", "completion"] = "auto"
    seed: int = 0
    html: Path | None = None
    json: Path | None = None
    write_config: Path | None = None

    @property
    def loads(self) -> list[int]:
        """One request at a time is always among them: kinds of text are told apart there."""
        return sorted({1, *self.concurrency})

    @property
    def temperatures(self) -> list[float]:
        return list(dict.fromkeys(self.temperature))


class ReadyLab(Lab, Protocol):
    ready: Ready


def run(
    config: Config,
    options: Options,
    *,
    open_lab: Callable[[EngineConfig], AbstractContextManager[ReadyLab]] = Child,
    load: Callable[[Config], Tokenizer] | None = None,
    clock: Callable[[], float] = time.perf_counter,
    out: Callable[[str], object] | None = None,
    say: Callable[[str], object] | None = None,
) -> bool:
    """Whether all texts stayed the same. Raises EngineError; then nothing was written."""
    say = say or (lambda line: sys.stderr.write(f"{line}\n"))
    entries = read_prompts(options.prompts)
    check_bodies(entries, str(options.prompts))
    size = min(len(entries), options.max_prompts)
    chosen = [entries[i * len(entries) // size] for i in range(size)]  # evenly spaced
    engine, notes = measured_engine(config.engine, options.loads)
    check_folders(engine)
    tokenizer = (load or _load_tokenizer)(config)
    # What only the engine knows, vocabulary and length, is checked once it is there.
    _tasks(config, options, tokenizer, any_engine(config), chosen)
    say(f"{len(chosen)} of {len(entries)} prompts; loading the models")
    with open_lab(engine) as lab:
        tasks = _tasks(config, options, tokenizer, lab.ready, chosen)
        found = {"found": len(entries), "chosen": len(chosen)}
        findings = Findings(
            facts(config, options, lab.ready, tasks, found), contenders(lab.ready, tasks), notes
        )
        Measurement(
            lab,
            tasks,
            findings,
            loads=options.loads,
            seconds=60 * options.minutes,
            path=str(options.prompts),
            decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=False),
            clock=clock,
            say=say,
        ).run()
    report_all(config, options, findings, out or sys.stdout.write)
    return findings.lossless


def measured_engine(said: EngineConfig, loads: Sequence[int]) -> tuple[EngineConfig, list[str]]:
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
    controller = AdaptiveConfig(k_max=max(said.speculation.k_max, *KS))
    speculation = said.speculation.model_copy(
        update={"proposer": proposer, "controller": controller, "trace": None}
    )
    cache = said.cache.model_copy(update={"prefix_caching": False})
    return said.model_copy(update={"speculation": speculation, "cache": cache}), notes


def facts(
    config: Config, options: Options, ready: Ready, tasks: Sequence[Task], found: dict[str, int]
) -> dict[str, Any]:
    """What a reader needs to know to judge the figures."""
    proposer = config.engine.speculation.proposer
    kinds = Counter({task.entry.line: task.kind for task in tasks}.values())
    return {
        "prompts": options.prompts.name,
        **found,
        "kinds": ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()),
        "target": config.engine.target.path,
        "draft": proposer.path if isinstance(proposer, DraftModelConfig) else None,
        "dtype": ready.dtype,
        "device": ready.device,
        "concurrency": options.loads,
        "temperatures": options.temperatures,
        "minutes": options.minutes,
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
    speculation = recommended(config.engine, advice.overall)
    best = Config(config.server, config.engine.model_copy(update={"speculation": speculation}))
    origin = f"foredraft evaluate, {findings.facts['date']}, {findings.facts['prompts']}"
    comments = [origin, *advice.reasons]
    report = Report(findings, advice, config_text(best, comments))
    out(f"{card(report)}\n")
    if options.write_config is not None:
        write_config(options.write_config, best, comments)
        out(f"Wrote {options.write_config}: foredraft serve {options.write_config}\n")
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


def _tasks(
    config: Config, options: Options, tokenizer: Tokenizer, ready: Ready, entries: Sequence[Entry]
) -> list[Task]:
    defaults = Defaults(
        path=str(options.prompts),
        temperatures=options.temperatures,
        max_tokens=options.max_tokens,
        chat=options.text_as == "chat"
        or (options.text_as == "auto" and tokenizer.has_chat_template),
        seed=options.seed,
    )
    return asyncio.run(make_tasks(config, tokenizer, ready, entries, defaults))
