"""The evaluation as one HTML page: opens offline, loads nothing, runs nothing. Whatever came of
prompts, models or paths is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path

from server.lab.evaluate.advice import parts_of
from server.lab.evaluate.findings import PLAIN, Cell, Findings, Record
from server.lab.evaluate.report import Report, columns, lossless_lines, noise_line
from server.lab.evaluate.svg import bars, lines

_STYLE = Path(__file__).with_name("page.css")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(report: Report) -> str:
    """The whole document."""
    findings = report.findings
    title = f"Foredraft evaluate: {findings.facts['prompts']}"
    body = "\n".join(
        piece
        for part in (
            _head(report, title), _lossless(findings), _why(report), _speed(report),
            _plots(findings), _kinds(findings), _config(report), _prompts(findings),
        )
        for piece in part
    )  # fmt: skip
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE.read_text('utf-8')}</style></head>\n"
        f"<body>\n{body}\n</body></html>\n"
    )


def _head(report: Report, title: str) -> Iterator[str]:
    f, advice = report.findings.facts, report.advice
    yield f"<h1>{escape(title)}</h1>"
    draft = f" with draft {f['draft']}" if f["draft"] else ""
    said = (
        f"{f['target']}{draft}, {f['dtype']} on {f['device']}. {f['chosen']} of {f['found']}"
        f" prompts ({f['kinds']}). Foredraft {f['version']}, {f['date']}."
    )
    yield f"<p>{escape(said)}</p>"
    for note in report.findings.notes:
        yield f"<p>Note: {escape(note)}.</p>"
    pays = advice.overall.name != PLAIN
    verdict = (
        f"It pays: serve with <b>{escape(advice.overall.name)}</b>, {advice.gain:.2f}x of plain"
        " decoding on the geometric mean of all loads and temperatures."
        if pays
        else "It does not pay: serve without guesses (K=0)."
    )
    yield f'<p class="verdict {"yes" if pays else "no"}">{verdict}</p>'


def _lossless(findings: Findings) -> Iterator[str]:
    first, *others = lossless_lines(findings)
    yield "<h2>Is it lossless here?</h2>"
    yield f'<p class="verdict {"yes" if findings.lossless else "no"}">{escape(first)}</p>'
    yield from (f"<p>{escape(line)}</p>" for line in others)


def _why(report: Report) -> Iterator[str]:
    yield "<h2>Why</h2><ul>"
    yield from (f"<li>{escape(reason)}</li>" for reason in report.advice.reasons)
    yield "</ul>"


def _speed(report: Report) -> Iterator[str]:
    findings, cells = report.findings, columns(report.findings)
    yield "<h2>Speed against K=0, by requests at a time</h2>"
    heads = [f"{cell.group}, {cell.load} at a time" for cell in cells]
    rows = [
        (contender.name, [_cell(report, cell, contender.name) for cell in cells])
        for contender in findings.contenders
    ]
    yield from _table("", heads, rows)
    yield f"<p>{escape(noise_line(findings))}.</p>"
    yield (
        "<p>Tokens per second, prompts included, in slices in which every contender ran the same"
        " prompts; small figures: the 95 % interval where there was more than one slice.</p>"
    )


def _cell(report: Report, cell: Cell, name: str) -> str:
    record = report.findings.cells[cell][name]
    if name == PLAIN:
        best = "best" if report.advice.best[cell] == PLAIN else ""
        return f'<td class="{best}">{record.rate:.0f} tokens/s</td>'
    kind = "best" if report.advice.best[cell] == name else "slow" if record.ratio < 1 else ""
    around = record.interval
    small = f"<small>{around[0]:.2f} to {around[1]:.2f}</small>" if around else ""
    return f'<td class="{kind}">{record.ratio:.2f}x{small}</td>'


def _table(corner: str, heads: list[str], rows: Iterable[tuple[str, list[str]]]) -> Iterator[str]:
    """`rows`: a name, and cells that are HTML already."""
    yield f"<table><tr><th>{escape(corner)}</th>"
    yield "".join(f"<th>{escape(head)}</th>" for head in heads) + "</tr>"
    for name, cells in rows:
        yield f"<tr><td>{escape(name)}</td>{''.join(cells)}</tr>"
    yield "</table>"


def _plots(findings: Findings) -> Iterator[str]:
    yield '<h2>In pictures</h2><div class="plots">'
    cells = columns(findings)
    for greedy in dict.fromkeys(cell.greedy for cell in cells):
        own = [cell for cell in cells if cell.greedy == greedy]
        series = {
            contender.name: [
                (i, ratio)
                for i, cell in enumerate(own)
                if (ratio := findings.cells[cell][contender.name].ratio) == ratio
            ]
            for contender in findings.contenders
            if contender.name != PLAIN
        }
        loads = [str(cell.load) for cell in own]
        title = f"Speed against K=0, {own[0].group}"
        yield lines(title, series, xs=loads, x="requests at a time", line=1.0)
    yield from _k_plots(findings)
    yield from _acceptance_plots(findings)
    for cell in cells:
        yield from _step_plot(findings, cell)
    yield "</div>"


def _k_plots(findings: Findings) -> Iterator[str]:
    """Of each family with several fixed K, the speed by K, a line for each cell."""
    for family in findings.families:
        fixed = [c for c in findings.contenders if c.family == family and c.mode.name == "fixed"]
        if len(fixed) > 1:
            series = {
                f"{cell.group}, {cell.load} at a time": [
                    (i, ratio)
                    for i, contender in enumerate(fixed)
                    if (ratio := findings.cells[cell][contender.name].ratio) == ratio
                ]
                for cell in columns(findings)
            }
            names = [str(contender.mode.k) for contender in fixed]
            yield lines(f"Speed against K=0: {family}", series, xs=names, x="K", line=1.0)


def _acceptance_plots(findings: Findings) -> Iterator[str]:
    found = list(findings.acceptance())
    for family in dict.fromkeys(name for name, *_ in found):
        series = {
            f"{kind}, {Cell(greedy, 1).group}": list(enumerate(survival))
            for name, kind, greedy, survival in found
            if name == family
        }
        depth = max(len(points) for points in series.values())
        places = [str(d + 1) for d in range(depth)]
        title = f"Guesses kept with all before them: {family}"
        yield lines(title, series, xs=places, x="position of the guess", line=1.0)


def _step_plot(findings: Findings, cell: Cell) -> Iterator[str]:
    """What a step takes by K, in plain steps."""
    records, stacks = findings.cells[cell], dict[str, dict[str, float]]()
    for contender in findings.contenders:
        parts = parts_of(records[contender.name], records[PLAIN])
        if parts is not None and contender.mode.name != "auto":
            name = contender.name.replace("draft K=", "d").replace("ngram K=", "n")
            stacks[name] = {"verify": parts.verify, "guess": parts.guess, "host": parts.host}
    if stacks:
        title = f"A step, in plain steps: {cell.group}, {cell.load} at a time"
        yield bars(title, stacks, x="K (d: draft, n: n-gram)")


def _kinds(findings: Findings) -> Iterator[str]:
    yield "<h2>By kind of text, one request at a time</h2>"
    names = [contender.name for contender in findings.contenders if contender.name != PLAIN]
    rows = [
        (f"{kind}, {Cell(greedy, 1).group}", [_ratio(records.get(name)) for name in names])
        for (kind, greedy), records in sorted(findings.by_kind.items())
    ]
    yield from _table("", names, rows)
    yield (
        "<p>json: the reply is held to JSON or tools, or the prompt is or asks for JSON. code: the"
        " prompt has code in it, or a chat speaks of programming. chat: other conversations. prose:"
        " other texts.</p>"
    )


def _ratio(record: Record | None) -> str:
    """Empty for one that took no part in the slices with that kind of text."""
    return "<td></td>" if record is None else f"<td>{record.ratio:.2f}x</td>"


def _config(report: Report) -> Iterator[str]:
    yield "<h2>Configuration to use</h2>"
    yield f"<pre>{escape(report.config)}</pre>"
    yield "<p>Serve it: <code>foredraft serve FILE.toml</code></p>"


def _prompts(findings: Findings) -> Iterator[str]:
    yield "<h2>The prompts</h2>"
    rows = [
        (
            f"{prompt.line} {prompt.id}".strip(),
            [
                f'<td class="text">{escape(prompt.title)}</td>',
                f"<td>{escape(prompt.kind)}</td><td>{prompt.temperature:g}</td>",
                f"<td>{prompt.prompt_tokens}</td>",
                f"<td>{'' if prompt.reply is None else prompt.reply}</td>",
            ],
        )
        for prompt in findings.prompts
    ]
    yield from _table("line", ["begins", "kind", "T", "tokens", "reply"], rows)
