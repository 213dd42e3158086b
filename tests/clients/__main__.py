"""`python -m tests.clients [NAME ...]`: test clients as users install them, on the built-in pair.

Each client has a script in `python/` or `node/`, and its own folder in `build/clients`, where its
package is installed from the registry that pip or npm is configured for. All clients use one
server; at the end the table for docs/clients.md is printed. A client whose package cannot be
installed is skipped, and the reason is printed. `--url URL` uses a server that is already running.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FOLDER = ROOT / "build" / "clients"
STEPS = ("hello", "streaming", "tools", "structured")
PATIENCE = 1800.0  # seconds for an installation or a script
QUIET = {  # turns off the clients' telemetry
    "AI_SDK_TELEMETRY_DISABLED": "1",
    "DO_NOT_TRACK": "1",
    "GUIDELLM_LOG_DISABLED": "1",
    "HF_HUB_OFFLINE": "1",
    "LANGCHAIN_TRACING_V2": "false",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "PYDANTIC_AI_DISABLE_TELEMETRY": "1",
}


@dataclass(frozen=True)
class Client:
    """A client; `packages` are installed, and the first one's version is reported."""

    script: str
    packages: tuple[str, ...]

    @property
    def package(self) -> str:
        return self.packages[0].partition("[")[0]

    @property
    def is_node(self) -> bool:
        return self.script.endswith(".mjs")


CLIENTS: Mapping[str, Client] = {
    "openai": Client("use_openai.py", ("openai",)),
    "anthropic": Client("use_anthropic.py", ("anthropic",)),
    "langchain": Client("use_langchain.py", ("langchain-openai",)),
    "litellm": Client("use_litellm.py", ("litellm",)),
    "instructor": Client("use_instructor.py", ("instructor",)),
    "pydantic-ai": Client("use_pydantic_ai.py", ("pydantic-ai-slim[openai]",)),
    "llm": Client("use_llm.py", ("llm",)),
    "openai-agents": Client("use_agents.py", ("openai-agents",)),
    "guidellm": Client("use_guidellm.py", ("guidellm",)),
    "npm-openai": Client("use_openai.mjs", ("openai",)),
    "npm-anthropic": Client("use_anthropic.mjs", ("@anthropic-ai/sdk",)),
    "npm-ai": Client(
        "use_ai_sdk.mjs", ("ai", "@ai-sdk/openai-compatible", "@ai-sdk/openai", "zod")
    ),
}


class NotInstalled(Exception):
    """A package could not be installed; the message is the reason."""


@dataclass
class Outcome:
    """A client's results. `version` is empty if it is not installed; the others are by step."""

    version: str = ""
    results: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def cell(self, step: str) -> str:
        if step in self.errors:
            return "failed"
        return "yes" if step in self.results else "-"


def install(name: str, client: Client) -> Path:
    """Return the client's folder, created at the first call. Raises NotInstalled."""
    folder = FOLDER / name
    done = folder / ".installed"
    if done.exists():
        return folder
    if client.is_node:
        if shutil.which("npm") is None:
            raise NotInstalled("there is no npm here")
        folder.mkdir(parents=True, exist_ok=True)
        _try("npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), *client.packages)
    else:
        if not (folder / "bin" / "python").exists():
            _try(sys.executable, "-m", "venv", str(folder))
        pip = (str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet")
        _try(*pip, "--no-compile", "--disable-pip-version-check", *client.packages)
    done.touch()
    return folder


def _try(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotInstalled(str(error)) from None
    if done.returncode:
        last = done.stderr.strip().splitlines() or ["no reason was given"]
        raise NotInstalled(last[-1][:200])


def version(folder: Path, client: Client) -> str:
    if client.is_node:
        card = folder / "node_modules" / client.package / "package.json"
        found: str = json.loads(card.read_text("utf-8"))["version"]
        return found
    code = f"from importlib.metadata import version; print(version({client.package!r}))"
    done = subprocess.run(
        [str(folder / "bin" / "python"), "-c", code], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def command(folder: Path, client: Client, url: str) -> list[str]:
    if client.is_node:  # node looks for modules next to the script
        for script in (HERE / "node").glob("*.mjs"):
            shutil.copy(script, folder / script.name)
        return ["node", str(folder / client.script), url]
    tokenizer = str(ROOT / "engine" / "demo" / "target")
    return [str(folder / "bin" / "python"), str(HERE / "python" / client.script), url, tokenizer]


def ask(argv: Sequence[str]) -> Outcome:
    """Run a script and read its lines. Ignore whatever else the client prints."""
    outcome = Outcome()
    environment = {**os.environ, **QUIET}
    environment.pop("PYTHONPATH", None)
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=PATIENCE, env=environment
        )
    except subprocess.TimeoutExpired:
        return Outcome(errors={"hello": f"nothing within {PATIENCE:.0f} s"})
    for line in done.stdout.splitlines():
        if line.startswith('{"step"'):
            report = json.loads(line)
            kind = outcome.errors if "error" in report else outcome.results
            kind[report["step"]] = report.get("error", report.get("result"))
    if done.returncode or not (outcome.results or outcome.errors):
        outcome.errors["hello"] = done.stderr.strip()[-1000:]
    return outcome


@contextmanager
def serving() -> Iterator[str]:
    """Run a server of the built-in pair; yield its address without /v1."""
    argv = [sys.executable, "-m", "server", "serve", "--port", "0"]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            start_banner = server.stdout.readline()
            yield start_banner.split(" at ")[1].strip().removesuffix("/v1")
        finally:
            server.terminate()


def table(outcomes: Mapping[str, Outcome]) -> str:
    lines = [["client", "package", "version", *STEPS], ["---"] * (3 + len(STEPS))]
    for name, outcome in outcomes.items():
        cells = [outcome.cell(step) for step in STEPS]
        lines.append([name, CLIENTS[name].package, outcome.version or "not installed", *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(names: Sequence[str], url: str) -> int:
    """Return 1 if any step failed, else 0."""
    outcomes: dict[str, Outcome] = {}
    for name in names:
        client = CLIENTS[name]
        try:
            folder = install(name, client)
        except NotInstalled as reason:
            print(f"{name}: not installed: {reason}")
            outcomes[name] = Outcome()
            continue
        outcome = outcomes[name] = ask(command(folder, client, url))
        outcome.version = version(folder, client)
        for step, result in (outcome.results | outcome.errors).items():
            mark = "failed: " if step in outcome.errors else ""
            print(f"{name} {outcome.version}, {step}: {mark}{result}", flush=True)
    print("\n" + table(outcomes))
    return 1 if any(outcome.errors for outcome in outcomes.values()) else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(CLIENTS))
    parser.add_argument("--url", help="of a server that runs already, without /v1")
    given = parser.parse_args()
    if unknown := [name for name in given.names if name not in CLIENTS]:
        parser.error(f"no such client: {', '.join(unknown)}; there are {', '.join(CLIENTS)}")
    names = given.names or list(CLIENTS)
    if given.url is not None:
        sys.exit(main(names, given.url))
    with serving() as url:
        sys.exit(main(names, url))
