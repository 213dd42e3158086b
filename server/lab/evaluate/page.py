"""The evaluation as one HTML page: opens offline, loads nothing, runs nothing. Whatever came of
prompts, models or paths is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape

from server.lab.evaluate.contenders import PLAIN
from server.lab.evaluate.findings import Cell
from server.lab.evaluate.report import (
    Report,
    acceptance_rows,
    heading,
    lossless_lines,
    noise_line,
    shown,
)

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .2rem .6rem; border-bottom: 1px solid #8884; text-align: left }
td.speed { background: linear-gradient(90deg, #2563eb44 var(--share), transparent 0) }
td.best { font-weight: 700 }
pre { background: #8881; padding: .8rem; overflow-x: auto }
"""


def page(report: Report) -> str:
    """The whole document."""
    title, *facts = map(escape, heading(report.findings))
    body = "\n".join([f"<h1>{title}</h1>", *_lines(facts), *_verdict(report), *_tables(report)])
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _lines(lines: Iterable[str]) -> Iterator[str]:
    yield from (f"<p>{line}</p>" for line in lines)


def _verdict(report: Report) -> Iterator[str]:
    name, gain = escape(report.advice.overall.name), report.advice.gain
    yield "<h2>Does it pay, and is it lossless here?</h2>"
    if name == PLAIN:
        yield "<p><b>It does not pay: serve without guesses (K=0).</b></p>"
    else:
        yield f"<p><b>It pays: serve with {name}, {gain:.2f}x of plain decoding.</b></p>"
    yield from _lines(map(escape, [*lossless_lines(report.findings), *report.advice.reasons]))
    yield f"<h2>Configuration to use</h2><pre>{escape(report.config)}</pre>"
    yield "<p>Serve it: <code>foredraft serve FILE.toml</code></p>"


def _tables(report: Report) -> Iterator[str]:
    findings = report.findings
    names = [contender.name for contender in findings.contenders]
    yield "<h2>Speed against K=0, by requests at a time</h2>"
    columns = findings.columns
    rows = [[_text(name), *(_speed(report, cell, name) for cell in columns)] for name in names]
    yield from _table(["", *(f"{cell.group}, {cell.load} at a time" for cell in columns)], rows)
    yield (
        f"<p>{escape(noise_line(findings))}. In brackets: the 95 % interval where there was more"
        " than one slice. Prompts are included.</p>"
    )
    yield "<h2>By kind of text, one request at a time</h2>"
    rows = [
        [_text(f"{cell.kind}, {cell.group}")]
        + [_text(shown(records, name) if name in records else "") for name in names]
        for cell, records in findings.kinds.items()
    ]
    yield from _table(["", *names], rows)
    yield "<h2>Guesses kept by position, with all before them</h2>"
    rows = [[_text(name), _text(" ".join(shares))] for name, shares in acceptance_rows(findings)]
    yield from _table(["", "position 1, 2, ..."], rows)
    yield "<h2>The prompts</h2>"
    rows = [
        [_text(p.line), _text(p.id), _text(p.title), _text(p.kind), _text(f"{p.temperature:g}"),
         _text(p.prompt_tokens), _text("" if p.reply is None else p.reply)]
        for p in findings.prompts
    ]  # fmt: skip
    yield from _table(["line", "id", "begins", "kind", "T", "tokens", "reply"], rows)


def _table(heads: list[str], rows: list[list[str]]) -> Iterator[str]:
    """`rows`: of cells that are HTML already."""
    yield f"<table><tr>{''.join(f'<th>{escape(head)}</th>' for head in heads)}</tr>"
    yield from (f"<tr>{''.join(cells)}</tr>" for cells in rows)
    yield "</table>"


def _text(value: object) -> str:
    return f"<td>{escape(str(value))}</td>"


def _speed(report: Report, cell: Cell, name: str) -> str:
    """With a bar behind it, as long as it is fast among those of all cells."""
    cells = report.findings.cells
    record, text = cells[cell][name], shown(cells[cell], name)
    if record.interval is not None and name != PLAIN:
        text += " ({:.2f} to {:.2f})".format(*record.interval)
    share = record.rank / max(
        other.rank for records in cells.values() for other in records.values()
    )
    best = " best" if report.advice.best[cell] == name else ""
    return f'<td class="speed{best}" style="--share:{share:.0%}">{text}</td>'
