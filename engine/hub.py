"""Hub reachability, which both processes check before their libraries try to download."""

from __future__ import annotations

from engine.errors import ModelError, one_line

REACH = 5.0  # seconds in which the hub has to answer


def refuse_unreachable(name: str, revision: str | None) -> None:
    """Raise ModelError if nothing of a hub repository is cached and the hub cannot be reached. Its
    library would retry for half a minute, or for six minutes if nothing answers."""
    from huggingface_hub import constants, get_session, try_to_load_from_cache

    try:
        if try_to_load_from_cache(name, "config.json", revision=revision) is not None:
            return
    except ValueError:  # from the library: no valid repository name
        raise ModelError(f"{name!r} is neither a folder nor a valid hub name") from None
    if constants.HF_HUB_OFFLINE:
        raise ModelError(
            f"{name!r} is not a folder, is not in the hub cache, and HF_HUB_OFFLINE is set"
        )
    try:
        get_session().head(constants.ENDPOINT, timeout=REACH)
    except Exception as error:  # whatever the library's client raises
        what = f"{type(error).__name__}: {one_line(error)}"
        raise ModelError(
            f"{name!r} is not a folder, and {constants.ENDPOINT} cannot be reached ({what})"
        ) from error
