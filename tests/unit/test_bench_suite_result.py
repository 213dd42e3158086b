"""The benchmark's card and demands, from made-up figures."""

from __future__ import annotations

import json
from dataclasses import replace

from engine.lab.bench.suite.reading import Reading, Reply, reading_lines
from engine.lab.bench.suite.result import (
    ADAPTIVE,
    HF_ASSISTED,
    HF_PLAIN,
    HF_TUNED,
    PLAIN,
    Result,
    card,
    demands,
)


def result() -> Result:
    rates = {PLAIN: 100.0, "K=4": 180.0, ADAPTIVE: 170.0}
    rates |= {HF_PLAIN: 80.0, HF_ASSISTED: 60.0, HF_TUNED: 95.0}
    return Result(
        facts={
            "target": "t", "draft": "d", "dtype": "float32", "device": "cpu", "threads": 2,
            "torch": "2", "transformers": "5", "prompts": 2, "prompt_tokens": [10, 20],
            "tokens": 8, "rounds": 3, "seconds": "of CPU time",
        },
        rates={name: {0.0: rate, 0.8: rate} for name, rate in rates.items()},
        ratios={name: {0.0: rate / 100, 0.8: rate / 150} for name, rate in rates.items()},
        acceptance={0.0: [0.9, 0.5], 0.8: [0.6, 0.25]},
        tokens_per_round={"K=4": {0.0: 3.0, 0.8: 2.0}},
        mean_k={0.0: 5.0, 0.8: 2.0},
        host_share={"batch 1, T=0": 0.1, "batch 8, T=0": 0.2},
        json_rates={PLAIN: {0.0: 100.0, 0.8: 90.0}, ADAPTIVE: {0.0: 140.0, 0.8: 150.0}},
        json_ratios={PLAIN: {0.0: 1.0, 0.8: 1.0}, ADAPTIVE: {0.0: 1.4, 0.8: 1.7}},
        texts_compared=4,
        texts_equal=4,
        concurrent={
            "streams": 64, "finished": 64, "equal": 63, "tokens_per_second": 500.0,
            "serial_tokens_per_second": 100.0,
        },
        served={
            "ready_seconds": 12.0, "ready_processor_seconds": 6.0, "streams": 64, "finished": 64,
            "equal": 64, "exit_code": 0,
        },
    )  # fmt: skip


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
        "concurrent streams that finished": True,
        "of those, equal to the serial text": False,
        "over HTTP: streams that finished": True,
        "over HTTP: equal to the text alone": True,
        "seconds to ready, second start": False,
        "texts equal to K=0": True,
    }


def test_best_is_ours() -> None:
    """Law: transformers cannot be our best configuration, however fast it is."""
    found = result()
    found.ratios[HF_PLAIN] = {0.0: 9.0, 0.8: 9.0}
    assert found.best(0.0) == "K=4"


def test_card_and_json_say_the_same() -> None:
    """Law: every contender has its row, every demand its verdict, and JSON is one line."""
    found = result()
    page = card(found)
    for name in found.rates:
        assert f"\n{name}" in page
    assert page.count("MISSED") == 5
    assert page.count("\nmet ") == 7
    line = found.as_json()
    assert "\n" not in line
    data = json.loads(line)
    assert data["lossless"] is True
    assert data["demands"]["T=0: K=4 against K=0"] == {"value": 1.8, "limit": 1.5, "met": True}


def test_one_differing_text_is_not_lossless() -> None:
    """Law: lossless means all of them."""
    found = result()
    found.texts_equal -= 1
    assert not found.lossless


def test_what_reading_allows() -> None:
    """Law: a round reads the target's weights once and the draft's once a guess, so 3 tokens of K=4
    at 2 GB/s, 400 MB and 50 MB take 0.3 s, and 0.2 with drafts for nothing; 30 tokens behind 20 of
    a prompt, of 50 M products each at 1000 M a second, 4 and 3 s. The demand is of the faster
    assisted generation. Weights that fit into caches are not read from memory."""
    found = result()
    found.rates[HF_ASSISTED][0.0], found.rates[HF_TUNED][0.0] = 2.0, 4.0
    found.tokens_per_round[ADAPTIVE] = {0.0: 9.0, 0.8: 9.0}
    reading, reply = Reading(400_000_000, 50_000_000, 2e9, 50_000_000, 1e9), Reply(30, 20.0)
    lines = list(reading_lines(found, reading, reply))
    assert len(lines) == 2
    assert lines[0].startswith("T=0: 4 times the faster assisted generation are 16.0 tokens/s; K=4")
    assert "at 2.0 GB/s, and prompts take 1 thousand million products a second: 7.5 " in lines[0]
    assert lines[0].endswith("7.5 (1.88x), with drafts for nothing 10.0 (2.50x)")
    assert list(reading_lines(found, replace(reading, target=14_000_000), reply)) == []
