"""Policies by name: what `--policy` takes."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from engine.config import AdaptiveConfig, FixedConfig, SpeculationConfig
from engine.control.controller import KController
from engine.control.modes import build_controller
from engine.errors import ConfigError

ALLOWED = "adaptive, fixed:K (0 to 16), or module:callable, which is called with k_max"


def build_policy(name: str, k_max: int, *, stops: bool = True) -> KController:
    """A fresh controller; `stops`: it will be asked between draft steps. Raises ConfigError for a
    name that is none."""
    kind, _, rest = name.partition(":")
    if name == "adaptive":
        config = AdaptiveConfig(k_max=k_max)
        return build_controller(SpeculationConfig(controller=config), stops=stops)
    if kind == "fixed" and rest.isdecimal() and int(rest) <= 16:
        return build_controller(SpeculationConfig(controller=FixedConfig(k=int(rest))))
    if kind.isidentifier() or "." in kind:
        return _made(name, _found(name, kind, rest), k_max)
    raise ConfigError(f"policy {name!r} is unknown; allowed: {ALLOWED}")


def _made(name: str, build: Callable[[int], KController], k_max: int) -> KController:
    """A user's own code may do anything."""
    try:
        made = build(k_max)
    except Exception as error:
        raise ConfigError(f"policy {name!r} cannot be built for K {k_max}: {error}") from error
    if not hasattr(made, "choose"):
        raise ConfigError(f"policy {name!r} builds no controller; allowed: {ALLOWED}")
    return made


def _found(name: str, module: str, attribute: str) -> Callable[[int], KController]:
    try:
        found: Callable[[int], KController] = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError):
        raise ConfigError(f"policy {name!r} is unknown; allowed: {ALLOWED}") from None
    if not callable(found):
        raise ConfigError(f"policy {name!r} cannot be called; allowed: {ALLOWED}")
    return found
