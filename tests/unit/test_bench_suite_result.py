"""The suite's card and demands, from made-up figures."""

from __future__ import annotations

import json
from dataclasses import replace

from engine.lab.bench.suite_result import (
    ADAPTIVE,
    HF_ASSISTED,
    HF_PLAIN,
    HF_TUNED,
    PLAIN,
    Result,
    card,
    demands,
)
from engine.lab.bench.turns import Row
from engine.lab.comparison.figures import Guesses, estimate


def row(part: str, name: str, t: float, rate: float, ratio: float, equal: int = 0) -> Row:
    made_up = Guesses([10.0, 4.0], [9.0, 2.0], [0.0, 10.0])
    return Row(part, name, t, estimate([rate]), estimate([ratio]), equal, equal, 2.0, 0.1, made_up)


def result() -> Result:
    rates = {PLAIN: 100.0, "K=4": 180.0, ADAPTIVE: 170.0}
    rates |= {HF_PLAIN: 80.0, HF_ASSISTED: 60.0, HF_TUNED: 95.0}
    rows = [row("code", n, 0.0, rate, rate / 100, 2) for n, rate in rates.items()]
    rows += [row("code", n, 0.8, rate, rate / 150) for n, rate in rates.items()]
    rows += [row("JSON", PLAIN, 0.0, 100.0, 1.0), row("JSON", ADAPTIVE, 0.0, 140.0, 1.4)]
    rows += [row("host", "batch 1", 0.0, 100.0, 1.0)]
    rows += [replace(row("host", "batch 8", 0.0, 100.0, 1.0), host_share=0.2)]
    rows += [replace(row("streams", "at once", 0.0, 500.0, 5.0, 63), compared=64)]
    served = {"ready_seconds": 12.0, "streams": 64, "finished": 64, "equal": 64, "exit_code": 0}
    return Result(facts={"target": "t"}, rows=rows, served=served)


def test_demands_are_judged() -> None:
    """Law: each demand is met or missed by its own figure, in its own direction."""
    judged = {demand.text: demand.met for demand in demands(result())}
    assert judged == {
        "T=0: K=4 against K=0": True,  # 1.8 of 1.5
        "T=0.8: K=4 against K=0": False,  # 1.2 of 1.3
        "T=0: K=4 against transformers' assisted": True,  # 3 of 2
        "T=0: JSON under a schema, adaptive against K=0": False,  # 1.4 of 1.5
        "host share of a step, batch 1, T=0": True,
        "host share of a step, batch 8, T=0": False,
        "concurrent streams, equal to the text alone": False,
        "over HTTP: streams that finished": True,
        "over HTTP: equal to the text alone": True,
        "seconds to ready, second start": False,
        "texts equal to K=0": False,
    }


def test_best_is_ours() -> None:
    """Law: transformers cannot be our best configuration, however fast it is."""
    found = result()
    found.rows.append(row("code", HF_PLAIN, 0.0, 900.0, 9.0))
    assert found.best("code", 0.0).name == "K=4"


def test_card_and_json_say_the_same() -> None:
    """Law: every contender has its row, every demand its verdict, and JSON is one line."""
    found = result()
    page = card(found)
    for entry in found.rows:
        assert f"\n{entry.name}" in page
    assert page.count("MISSED") == 6
    assert page.count("\nmet ") == 5
    line = found.as_json()
    assert "\n" not in line
    data = json.loads(line)
    assert data["lossless"] is False
    assert data["demands"]["T=0: K=4 against K=0"] == {"value": 1.8, "limit": 1.5, "met": True}


def test_one_differing_text_is_not_lossless() -> None:
    """Law: lossless means all of ours; what transformers says is not promised."""
    found = result()
    found.rows = [entry for entry in found.rows if entry.part == "code"]
    assert found.lossless
    found.rows.append(replace(row("code", HF_PLAIN, 0.0, 1.0, 1.0, 1), compared=2))
    assert found.lossless
    found.rows.append(replace(row("code", "K=4", 0.0, 1.0, 1.0, 1), compared=2))
    assert not found.lossless
