"""Verification. There is one rule, exact for every proposer: sample and match.

The target's token is drawn at every row of a proposal at once, with noise keyed by (seed, absolute
position, token id); the walk then follows the proposal while some child equals the token drawn at
its parent. So a draw never depends on the proposal: each emitted token has the target's
distribution, and is the token that plain decoding would have emitted (Daliri, Musco and Suresh,
arXiv:2408.07978).

The trimming law: since a proposal never influences a token, anything may shorten it before the
forward (a budget, a grammar, low confidence), even depending on the draft token.
"""

from __future__ import annotations

from operator import ne

import msgspec

from engine.scheduling.segment import CHAIN
from engine.speculation.proposal import Proposal


class VerifyResult(msgspec.Struct):
    """The result for one sampling chunk. `drawn`: the tokens walked along; `path`: accepted node
    indices in order; `tokens`: their tokens, then exactly one new token. `tokens` is empty if the
    root's logits are not finite; if only deeper logits are not, the walk ends before them."""

    drawn: list[int]
    path: list[int] = []
    tokens: list[int] = []


def walk(proposal: Proposal, drawn: list[int]) -> VerifyResult:
    """Follow `proposal` along the tokens drawn at its root (`drawn[0]`) and nodes (`drawn[1 + i]`).
    A negative value marks a row from which nothing could be drawn."""
    if proposal.branches is None and min(drawn) >= 0:
        wrong = [*map(ne, drawn, proposal.tokens), True]
        kept = wrong.index(True)
        return VerifyResult(drawn, CHAIN[1 : kept + 1], drawn[: kept + 1])
    children: dict[tuple[int, int], int] = {}
    for node, place in enumerate(zip(proposal.parents, proposal.tokens, strict=True)):
        children.setdefault(place, node)
    result = VerifyResult(drawn)
    node = -1
    while True:
        token = drawn[1 + node]
        if token < 0:
            break
        result.tokens.append(token)
        child = children.get((node, token))
        if child is None:
            return result
        result.path.append(child)
        node = child
    del result.path[-1:]  # the token before the unusable row becomes the new one
    return result
