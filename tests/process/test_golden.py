"""A part of `python -m tests.golden check`: one server's replies equal the recorded ones."""

from __future__ import annotations

import json

import pytest

from tests.golden.replay import TEXTS, differences, replay
from tests.golden.requests import requests

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_replies_are_those_recorded() -> None:
    """Law: 23 of the 200 requests, of every endpoint and temperature, get the recorded replies."""
    recorded = json.loads(TEXTS.read_text("utf-8"))
    all_requests = requests()
    assert len(all_requests) == len(recorded) == 200
    some = slice(0, None, 9)  # coprime to the number of temperatures
    found = replay("adaptive", all_requests[some])
    assert list(differences(recorded[some], found)) == []
