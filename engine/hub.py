"""Whether the hub can be asked for a model: for both processes, before their libraries try."""

from __future__ import annotations

from engine.errors import ModelError, one_line

REACH = 5.0  # seconds in which the hub has to answer


def refuse_unreachable(name: str, revision: str | None) -> None:
    """Raise ModelError where nothing was kept of a repository of the hub and that cannot be
    reached: its library would go on trying, for half a minute or, without any answer, for six."""
    from huggingface_hub import constants, get_session, try_to_load_from_cache

    try:
        if try_to_load_from_cache(name, "config.json", revision=revision) is not None:
            return
    except ValueError:  # of the library: no repository has such a name
        raise ModelError(f"{name!r} is no folder, and no name of the hub's") from None
    if constants.HF_HUB_OFFLINE:
        raise ModelError(
            f"{name!r} is no folder, was not fetched before, and HF_HUB_OFFLINE is set"
        )
    try:
        get_session().head(constants.ENDPOINT, timeout=REACH)
    except Exception as error:  # of the library's client
        what = f"{type(error).__name__}: {one_line(error)}"
        raise ModelError(
            f"{name!r} is no folder, and {constants.ENDPOINT} cannot be reached ({what})"
        ) from error
