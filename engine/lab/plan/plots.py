"""The plot: speed-up and best K over the batch, a curve for each context. Needs matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.lab.picture import picture
from engine.lab.plan.outcome import Block, Outcome

if TYPE_CHECKING:
    from engine.lab.picture import Axes


def draw(outcome: Outcome, name: str) -> None:
    """Write a PNG. Raises ConfigError where matplotlib is missing or the name does not fit."""
    settings, blocks = outcome.settings, outcome.blocks
    with picture(name, (4 * len(blocks) + 1, 6)) as figure:
        axes = figure.subplots(2, len(blocks), squeeze=False, sharex=True, sharey="row")
        for column, block in enumerate(blocks):
            _panel(axes[0][column], axes[1][column], block, settings.contexts)
        axes[0][0].set_ylabel("speed-up at the best K")
        axes[1][0].set_ylabel("best K")
        axes[0][-1].legend(title="context")
        draft = settings.draft.name if settings.draft else "free guesses"
        figure.suptitle(
            f"{settings.target.name} with {draft} on {settings.device.count} x"
            f" {settings.device.name}, acceptance {settings.acceptance:g}; on paper"
        )


def _panel(speeds: Axes, ks: Axes, block: Block, contexts: tuple[int, ...]) -> None:
    """One precision; dashed where the KV does not fit the memory or a model its positions."""
    for context in contexts:
        cells = sorted(
            (cell for cell in block.cells if cell.context == context), key=lambda cell: cell.batch
        )
        batches = [cell.batch for cell in cells]
        (line,) = speeds.plot(batches, [cell.speed_up for cell in cells], "--")
        fitting = [cell for cell in cells if cell.fits is not False and cell.within_positions]
        speeds.plot(
            [cell.batch for cell in fitting],
            [cell.speed_up for cell in fitting],
            "o-", color=line.get_color(), label=str(context),
        )  # fmt: skip
        ks.plot(batches, [cell.best_k for cell in cells], "o-", color=line.get_color())
    speeds.axhline(1, color="grey", linewidth=0.8)
    speeds.set_title(block.precision)
    ks.set_xscale("log", base=2)
    ks.xaxis.set_major_formatter("{x:.0f}")
    ks.set_xlabel("batch (dashed: does not fit)")
