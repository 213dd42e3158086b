"""`foredraft evaluate`: does speculation pay for these prompts, here, and is it lossless?

Starts a server for each CONFIG.toml and --draft, compares ways to serve your prompts, and prints by
temperature and concurrency: tokens per second, also relative to K=0, the acceptance of draft
tokens, and whether every text stayed the same. Of several servers, a last table ranks the best ways
against K=0. `foredraft tune` says in one sentence what to serve with. Exit code 1 if a text
changed, 2, with a sentence, for a usage error.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any

from engine.arguments import Parser, exit_code, lists_of, number, show, whole
from engine.config import AdaptiveConfig, NgramConfig, check_folders
from engine.errors import ConfigError
from engine.lab.comparison.figures import Comparison
from engine.lab.comparison.race import Race
from engine.lab.comparison.report import ANSWER, as_dict, card, joint
from engine.lab.comparison.workload import Workload
from engine.lab.files import writable, write_json
from server.config import Config, load_config, overrides_of
from server.lab.bench.client import Client
from server.lab.bench.player import Servers
from server.lab.bench.spawned import spawned
from server.lab.evaluate.player import KS, PromptServer, Settings, settings_of
from server.lab.evaluate.prompts import CHAT, Prompt, read_prompts
from server.lab.evaluate.prompts import __doc__ as prompts_doc

_MOST = 10**6  # upper bound of all counts
NAMES = {"draft_model": "draft", "none": "ngram"}  # of proposers, where not their kind
Connect = Callable[[Config], AbstractContextManager[tuple[int, Client]]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parsed = build_parser().parse_args(arguments)
    return exit_code("foredraft evaluate", lambda: evaluate(parsed))


def build_parser() -> argparse.ArgumentParser:
    parser = Parser("foredraft evaluate", f"{__doc__}\n{prompts_doc}")
    add = parser.add_argument
    add("configs", nargs="*", default=[], metavar="CONFIG.toml",
        help="what you would serve with; several are compared")  # fmt: skip
    add("--prompts", required=True, type=Path, metavar="FILE", help="your prompts")
    add("--target", metavar="MODEL", help="the model: a folder or a hub name")
    add("--draft", dest="drafts", action="append", metavar="MODEL",
        help="a draft for it: a folder or a hub name; several are compared")  # fmt: skip
    add("--set", dest="sets", action="append", default=[], metavar="key=value",
        help="any configuration key; may be repeated")  # fmt: skip
    add("--minutes", type=number(0, 1e5, above=True), default=5.0,
        help="approximate time limit in minutes (5)")  # fmt: skip
    add("--max-prompts", type=whole(1, _MOST), default=64, metavar="N",
        help="of a longer file, N evenly spaced prompts (64)")  # fmt: skip
    add("--max-tokens", type=whole(1, _MOST), default=128, metavar="N", help="longest reply (128)")
    add("--concurrency", type=lists_of(whole(1, _MOST)), default=(1, 4, 16), metavar="N,N,...",
        help="requests at a time (1,4,16)")  # fmt: skip
    add("--temperature", type=lists_of(number(0, 2)), default=(0.0, 1.0), metavar="T,T,...",
        help="for prompts without their own (0,1)")  # fmt: skip
    add("--seed", type=whole(0, 2**32 - 1), default=0,
        help="for prompts without their own (0)")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write all figures")
    return parser


def evaluate(parsed: argparse.Namespace, *, connect: Connect = spawned) -> int:
    """Return the exit code: 0; 1 if a text changed. Raises EngineError before writing a file."""
    writable({"--json": parsed.json}, reads=[parsed.prompts, *parsed.configs])
    configs = configs_of(parsed)
    most = min(config.engine.schedule.max_sequences for config in configs.values())
    if max(parsed.concurrency) > most:
        given = f"--concurrency {max(parsed.concurrency)}"
        raise ConfigError(f"{given} exceeds schedule.max_sequences = {most}")
    prompts = read_prompts(parsed.prompts)
    for prompt in prompts:
        prompt.check()
    for config in configs.values():
        check_folders(config.engine)
    size = min(len(prompts), parsed.max_prompts)
    chosen = [prompts[i * len(prompts) // size] for i in range(size)]  # evenly spaced
    sys.stderr.write(f"{size} of {len(prompts)} prompts; loading the models\n")
    comparisons: list[Comparison] = []
    predicted = any("prediction" in prompt.body for prompt in chosen)
    for name, config in configs.items():
        free = not comparisons
        own = settings_of(config.engine.speculation, name, free=free, predicted=predicted)
        with connect(measured(config)) as (_, client):
            comparison, engine = compare(parsed, client, chosen, own, len(configs))
        comparisons.append(comparison)
    facts = {
        "prompts": f"{parsed.prompts.name} ({size} of {len(prompts)})",
        "target": ", ".join(dict.fromkeys(each.engine.target.path for each in configs.values())),
        "drafts": ", ".join(parsed.drafts or []) or "as configured",
        **{name: engine[name] for name in ("dtype", "device", "version")},
        "date": date.today().isoformat(),
    }
    return conclude(parsed, facts, comparisons)


def configs_of(parsed: argparse.Namespace) -> dict[str, Config]:
    """Return the configuration of each server by what tells it from the others: file and draft, or
    for one server the proposer. Raises ConfigError."""
    found: dict[str, Config] = {}
    given = parsed.configs or [None], parsed.drafts or [None]
    for path, draft in product(*given):
        options = {"target.path": parsed.target, "speculation.proposer.path": draft}
        config = load_config(path, [*overrides_of(options), *parsed.sets], os.environ)
        kind = config.engine.speculation.proposer.kind
        words = [word for word, axis in zip((path, draft), given, strict=True) if len(axis) > 1]
        found[" ".join(words) or NAMES.get(kind, kind)] = config
    return found


def measured(config: Config) -> Config:
    """Return `config` changed for measuring: every arm can run, prefix caching is off since prompts
    are repeated here, and the server is private to this program."""
    speculation = config.engine.speculation
    changes = {
        "proposer": NgramConfig() if speculation.proposer.kind == "none" else speculation.proposer,
        "controller": AdaptiveConfig(k_max=max(speculation.k_max, *KS)),
        "trace": None,
        "record_ids": None,
    }
    parts = {
        "speculation": speculation.model_copy(update=changes),
        "cache": config.engine.cache.model_copy(update={"prefix_caching": False}),
    }
    private = {
        "host": "127.0.0.1", "port": 0, "log_level": "error", "max_restarts": 0,
        "api_key": None, "api_keys_file": None, "admin_key": secrets.token_hex(),
        "tls_certificate": None, "tls_key": None, "request_timeout_seconds": None,
        "max_inflight": None, "max_waiting_tokens": None, "otlp_endpoint": None,
    }  # fmt: skip
    server = config.server.model_copy(update=private)
    return Config(server, config.engine.model_copy(update=parts))


def compare(
    parsed: argparse.Namespace,
    client: Client,
    prompts: Sequence[Prompt],
    settings: Settings,
    num_servers: int,
) -> tuple[Comparison, Mapping[str, Any]]:
    """Run the race on one of `num_servers` servers; return it and /version. Raises EngineError."""
    chat = client.call("/v1/capabilities")["endpoints"][CHAT]["messages"]
    if chat["status"] != "refused":
        prompts = [prompt.as_chat() if prompt.plain else prompt for prompt in prompts]
    requests = [r for p in prompts for r in p.requests(parsed.temperature, parsed.seed)]
    pools: dict[str, list[str]] = {}
    for i, request in enumerate(requests):
        pools.setdefault(f"T={request.body['temperature']:g}", []).append(str(i))
    workloads = [Workload(*each) for each in product(pools, [None], sorted(parsed.concurrency))]
    server = PromptServer(client, requests, settings, parsed.max_tokens)
    server.check()
    race = Race(tuple(settings), workloads, pools, minutes=parsed.minutes / num_servers)
    return race.run(Servers(server, {})), server.version


def conclude(
    parsed: argparse.Namespace, facts: Mapping[str, Any], comparisons: Sequence[Comparison]
) -> int:
    """Print and write the results; return the exit code. Raises ConfigError."""
    show("Foredraft evaluate: " + "; ".join(f"{name} {value}" for name, value in facts.items()))
    for comparison in comparisons:
        show(card(comparison))
    if len(comparisons) > 1:
        show(joint(comparisons))
    show(ANSWER)
    write_json(parsed.json, {"facts": facts, "found": [as_dict(each) for each in comparisons]})
    return int(any(c.texts_equal < c.texts_compared for c in comparisons))


if __name__ == "__main__":
    sys.exit(main())
