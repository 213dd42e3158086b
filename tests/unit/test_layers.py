"""The import rule: who may import whom. The two tables are its documentation."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# A module imports only from its own level or below; the longest matching prefix decides. Each
# folder has its own level, so folders cannot import each other in a circle.
LEVELS = {
    "engine": 0,  # the package itself is empty
    "engine.messages": 0, "engine.config": 0, "engine.errors": 0, "engine.arguments": 0,
    "engine.logs": 0, "engine.hub": 0, "engine.progress": 0,
    "engine.child": 1, "engine.scheduling": 2, "engine.control": 3,  # no torch
    "engine.attention": 4, "engine.sampling": 5, "engine.cpu": 6,
    "engine.grammar": 7, "engine.model": 8, "engine.speculation": 9, "engine.step": 10,
    "engine.core": 11, "engine.process": 12, "engine.__main__": 12,
    "engine.demo": 1, "engine.lab": 13,  # offline
}  # fmt: skip
CONTRACT = {
    "engine", "engine.messages", "engine.config", "engine.errors", "engine.arguments",
    "engine.logs", "engine.hub",
    "engine.lab.files",  # shared by the command lines of both sides
}  # fmt: skip
# The server's levels, like LEVELS: a folder imports only from its own level or below.
SERVER_LEVELS = {
    "server": 0,  # the package itself is empty
    "server.config": 0, "server.errors": 0,
    "server.engine": 1, "server.keys": 1, "server.text": 1,
    "server.observe": 2, "server.supervise": 2,
    "server.generation": 3,
    "server.api": 4,
    "server.app": 5, "server.connection": 5, "server.sender": 5,
    "server.replicas.replica": 6, "server.listening": 6,
    "server.serve": 7, "server.replicas": 7, "server.cli": 8, "server.__main__": 9,
    "server.lab": 8,
}  # fmt: skip
# Standalone programs of the server, and the part of the engine each may import as well.
OFFLINE = {
    "server.lab.bench": "engine.lab.comparison",
    "server.lab.bench.spawned": "engine.child",
    "server.lab.evaluate": "engine.lab.comparison",
}

# The only modules or packages that may import each heavy package.
ALLOWED_IMPORTERS = {
    "torch": ["engine.attention", "engine.model", "engine.sampling", "engine.cpu", "engine.core",
              "engine.demo", "engine.grammar.compiler", "engine.step", "engine.speculation",
              "engine.lab.bench", "engine.lab.demo",
              "engine.lab.plan.machine", "engine.lab.plan.shape",
              "engine.lab.synthetic", "engine.lab.train"],
    "transformers": ["engine.model.checkpoint", "engine.model.precision",
                     "engine.attention.interface", "engine.demo",
                     "engine.lab.bench", "engine.lab.demo", "engine.lab.plan",
                     "engine.lab.synthetic", "engine.lab.train",
                     "engine.grammar.vocabulary",
                     "server.text.tokenizer"],
    "flashinfer": ["engine.model.attention_choice"],
    "triton": ["engine.attention.triton_kernels", "engine.model.triton_layers",
               "engine.model.triton_products", "engine.sampling.triton_kernels"],
    "numba": ["engine.cpu"],
    "llvmlite": ["engine.cpu"],
    "tokenizers": ["engine.demo", "engine.grammar.vocabulary", "server.text.tokenizer"],
    "llguidance": ["engine.grammar", "engine.model.pair"],
    "huggingface_hub": ["engine.hub"],
    "safetensors": ["engine.lab.demo", "engine.model.head_files", "engine.model.llama",
                    "engine.scheduling.memory",
                    "engine.lab.train.program"],
    "zmq": ["engine.process", "server.engine.client", "server.engine.events"],
    "prometheus_client": ["server.observe.metrics"],
    "opentelemetry": ["server.observe.tracing"],
    "ray": ["server.replicas.ray_app", "server.replicas.ray_router"],
    "fastapi": ["server.app", "server.api"],
    "uvloop": ["server.serve"],
    "uvicorn": ["server.app", "server.cli", "server.__main__", "server.listening", "server.serve",
                "server.connection", "server.sender"],
}  # fmt: skip
CPU_INTERFACE = {
    "engine.cpu.ahead", "engine.cpu.attention", "engine.cpu.decoder", "engine.cpu.draws",
    "engine.cpu.fused", "engine.cpu.jit",
}  # fmt: skip


def modules() -> Iterator[tuple[str, Path]]:
    for package in ("engine", "server"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


MODULES = dict(modules())
PACKAGES = {module for module, path in MODULES.items() if path.name == "__init__.py"}


@cache
def imports(path: Path) -> set[str]:
    """Return every module that a file imports, including imports inside functions."""
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
    """Whether `module` is `owner`, lies inside it, or is a sibling named after it (bench_x)."""
    return module == owner or module.startswith((owner + ".", owner + "_"))


def level(module: str) -> float:
    package = module.partition(".")[0]
    levels = {"engine": LEVELS, "server": SERVER_LEVELS}[package]
    fitting = [owner for owner in levels if owner != package and within(module, owner)]
    assert fitting or module == package, f"{module} has no level: add it to the table"
    return levels[max(fitting, key=len, default=package)]


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


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith("server")])
def test_a_folder_of_the_server_imports_only_what_is_below_it(module: str) -> None:
    for imported in imports(MODULES[module]):
        if within(imported, "server"):
            assert level(imported) <= level(module), f"{module} imports {imported}"


@pytest.mark.parametrize("package", ["engine", "server"])
def test_folders_import_without_circles(package: str) -> None:
    """Law: of two folders, at most one imports the other, also through others."""
    left: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        if within(module, package):
            needed = {folder(name) for name in imports(path) if within(name, package)}
            left.setdefault(folder(module), set()).update(needed - {folder(module)})
    while free := [name for name, needed in left.items() if not needed & left.keys()]:
        for name in free:
            del left[name]
    assert not left, f"circles among {', '.join(sorted(left))}, or what imports them"


def folder(module: str) -> str:
    """Return the package of a module, or the module itself if its package has other packages."""
    above = module.rpartition(".")[0]
    alone = module in PACKAGES or any(each.startswith(above + ".") for each in PACKAGES)
    return module if alone else above


def test_modules_import_without_circles() -> None:
    """Law: modules import each other without circles, even for types alone."""
    left = {module: imports(path) & MODULES.keys() - {module} for module, path in MODULES.items()}
    while free := [module for module, needed in left.items() if not needed & left.keys()]:
        for module in free:
            del left[module]
    assert not left, f"circles among {', '.join(sorted(left))}, or what imports them"


@pytest.mark.parametrize("package", ALLOWED_IMPORTERS)
def test_heavy_packages_have_one_door(package: str) -> None:
    for module, path in MODULES.items():
        if any(within(module, door) for door in ALLOWED_IMPORTERS[package]):
            continue
        for imported in imports(path):
            assert not within(imported, package), f"{module} imports {imported}"


def test_the_compiled_code_has_one_door() -> None:
    """Law: outside engine.cpu, code imports only its decoders, sampler, attention and compiler."""
    for module, path in MODULES.items():
        if within(module, "engine.cpu"):
            continue
        parts = {name for name in imports(path) if name.startswith("engine.cpu.")}
        assert parts <= CPU_INTERFACE, (
            f"{module} imports {', '.join(sorted(parts - CPU_INTERFACE))}"
        )


@pytest.mark.parametrize("folder", ["unit", "api"])
def test_the_fast_tiers_run_without_torch(folder: str) -> None:
    for path in (ROOT / "tests" / folder).rglob("*.py"):
        assert not any(within(name, "torch") for name in imports(path)), path
