"""The import rule: who may import whom. The two tables are its documentation."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# A module imports from its own level or below, never above; the longest prefix that fits decides.
LEVELS = {
    "engine": 0,  # the package itself is empty
    "engine.messages": 0, "engine.config": 0, "engine.errors": 0,
    "engine.evaluate_messages": 0, "engine.arguments": 0, "engine.files": 0,
    "engine.torchao_warnings": 0,
    "engine.picture": 1,
    "engine.constraint": 1, "engine.sequence": 1, "engine.step_plan": 1, "engine.step_clock": 1,
    "engine.block_pool": 1, "engine.scheduler": 1, "engine.speculation.grammar": 1,
    "engine.controller": 1, "engine.modes": 1, "engine.estimates": 1, "engine.plan": 1,
    "engine.adaptive": 1, "engine.forecast": 1, "engine.exploration": 1, "engine.experience": 1,
    "engine.confidence": 1, "engine.step_costs": 1, "engine.spells": 1, "engine.chances": 1,
    "engine.cost_curve": 1, "engine.line": 1, "engine.part_costs": 1, "engine.hearing": 1,
    "engine.configured": 1, "engine.kernels_forecast": 1,
    "engine.profile": 1, "engine.validation": 1, "engine.lessons": 1,
    "engine.rests": 1, "engine.staying": 1, "engine.turning": 1, "engine.going_on": 1,
    "engine.speculation.proposal": 1, "engine.speculation.proposer": 1,
    "engine.speculation.ngram": 1, "engine.speculation.prediction": 1,
    "engine.speculation.evidence": 1, "engine.speculation.look_up": 1,
    "engine.speculation.cascade": 1, "engine.allowance": 1,
    "engine.threads": 1, "engine.parent": 1, "engine.memory": 1, "engine.jit": 1,
    "engine.first_start": 1, "engine.settling": 1,
    "engine.attention": 2.0, "engine.model": 2.1, "engine.sampling": 2.1,
    "engine.speculation": 2.2,
    "engine.pair": 3, "engine.profiling": 3, "engine.acceptance": 3, "engine.step_metrics": 3,
    "engine.report": 3, "engine.one_wait": 3, "engine.rounds": 3, "engine.core": 3.1,
    "engine.process": 4, "engine.__main__": 4.1, "engine.bench": 4.1, "engine.evaluate": 4,
    "engine.scripted": 4.2,
    "engine.comparison": 4, "engine.trace": 1, "engine.recording": 3,
    "engine.replay": 3.9, "engine.simulate": 4,  # offline, without models
    "engine.compiling": 3, "engine.grammar_check": 4, "engine.grammar_children": 1,
    "engine.synthetic": 4,
    "engine.demo": 4,  # offline, like the benchmarks, which take their prompts from it
}  # fmt: skip
CONTRACT = {
    "engine", "engine.messages", "engine.config", "engine.errors", "engine.evaluate_messages",
    "engine.arguments", "engine.files",  # of command lines, on both sides
}  # fmt: skip
OFFLINE = {"server.bench": "engine.comparison"}  # a program of its own; pure Python on both sides

# One door per heavy package: the only modules (or packages) that may name it.
DOORS = {
    "torch": ["engine.attention", "engine.model", "engine.sampling", "engine.core", "engine.demo",
              "engine.speculation.draft_model", "engine.speculation.draft_forwards",
              "engine.speculation.hindsight",
              "engine.speculation.verify", "engine.bench",
              "engine.synthetic"],
    "transformers": ["engine.model.loader", "engine.model.loaded", "engine.model.model_config",
                     "engine.model.weights", "engine.model.quantization",
                     "engine.attention.interface", "engine.demo",
                     "engine.bench", "engine.sampling.vocabulary", "engine.synthetic",
                     "server.tokenizer"],
    "flashinfer": ["engine.attention.choice"],
    "torchao": ["engine.model.quantization"],
    "numba": ["engine.jit", "engine.first_start", "engine.attention.tiles",
              "engine.attention.vectors", "engine.model.kernels", "engine.sampling.kernels"],
    "llvmlite": ["engine.jit", "engine.attention.tiles", "engine.attention.vectors",
                 "engine.model.kernels", "engine.sampling.kernels"],
    "tokenizers": ["engine.demo", "engine.sampling.vocabulary", "server.tokenizer"],
    "llguidance": ["engine.sampling.grammar", "engine.sampling.vocabulary", "engine.grammar_check",
                   "engine.pair"],
    "matplotlib": ["engine.picture"],
    "huggingface_hub": ["engine.plan.find_model"],
    "safetensors": ["engine.demo", "engine.model.llama"],
    "zmq": ["engine.process", "engine.bench.host", "server.engine_client"],
    "prometheus_client": ["server.metrics"],
    "fastapi": ["server.app", "server.api"],
    "sse_starlette": ["server.app", "server.api"],
    "uvloop": ["server.loop"],
    "uvicorn": ["server.app", "server.cli", "server.__main__", "server.serve", "server.connection"],
}  # fmt: skip


def modules() -> Iterator[tuple[str, Path]]:
    for package in ("engine", "server"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


MODULES = dict(modules())


@cache
def imports(path: Path) -> set[str]:
    """Every module that a file imports, at whatever depth of its code."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            found.update(submodules & MODULES.keys() or {node.module})
    return found


def within(module: str, owner: str) -> bool:
    """Whether `module` is `owner`, lies in it, or is a sibling file named after it (bench_x)."""
    return module == owner or module.startswith((owner + ".", owner + "_"))


def level(module: str) -> float:
    fitting = [owner for owner in LEVELS if owner != "engine" and within(module, owner)]
    assert fitting or module == "engine", f"{module} has no level: add it to the table"
    return LEVELS[max(fitting, key=len, default="engine")]


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith("engine")])
def test_engine_imports_only_its_own_level_or_below(module: str) -> None:
    for imported in imports(MODULES[module]):
        assert not within(imported, "server"), f"{module} imports {imported}"
        if within(imported, "engine"):
            assert level(imported) <= level(module), f"{module} imports {imported}"


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith("server")])
def test_the_server_imports_only_the_contract_of_the_engine(module: str) -> None:
    more = [owned for owner, owned in OFFLINE.items() if within(module, owner)]
    for imported in imports(MODULES[module]):
        allowed = imported in CONTRACT or any(within(imported, owned) for owned in more)
        assert allowed or not within(imported, "engine"), f"{module}: {imported}"


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Law: modules can be read one after the other. Also where only types are meant."""
    left = {module: imports(path) & MODULES.keys() - {module} for module, path in MODULES.items()}
    while free := [module for module, needed in left.items() if not needed & left.keys()]:
        for module in free:
            del left[module]
    assert not left, f"circles among {', '.join(sorted(left))}, or what imports them"


@pytest.mark.parametrize("package", DOORS)
def test_heavy_packages_have_one_door(package: str) -> None:
    for module, path in MODULES.items():
        if any(within(module, door) for door in DOORS[package]):
            continue
        for imported in imports(path):
            assert not within(imported, package), f"{module} imports {imported}"


@pytest.mark.parametrize("folder", ["unit", "api"])
def test_the_fast_tiers_run_without_torch(folder: str) -> None:
    for path in (ROOT / "tests" / folder).rglob("*.py"):
        assert not any(within(name, "torch") for name in imports(path)), path
