"""Why this K, and what came of it: estimates and sums as sentences."""

from __future__ import annotations

from engine.messages import Estimates
from server.observe.speculation import Gain


def came_of(gain: Gain) -> str:
    """What all guesses together came to lately, and whose they were; empty before the first."""
    if not gain.tokens_per_round:
        return ""
    shares = sorted(gain.shares.items(), key=lambda pair: -pair[1].tokens)
    if not shares:
        return "Lately nothing was guessed."
    told = f"Lately {gain.tokens_per_round:.2f} tokens a request and step"
    if gain.speedup is not None:
        told += f", {gain.speedup:.2f} times as fast as without any guesses"
    parts = [f"{100 * share.tokens:.0f} by {name}" for name, share in shares]
    return f"{told}; of 100 tokens guessed {', '.join(parts)}."


def why(estimates: Estimates) -> str:
    """One or two sentences about the last choice."""
    if estimates.num_sequences == 0:
        return f"{_mode(estimates) or 'No step has been made yet.'}"
    return " ".join(filter(None, [_mode(estimates) or _reason(estimates), _evidence(estimates)]))


def _mode(estimates: Estimates) -> str:
    """Of a mode that the operator switched to."""
    match estimates.mode:
        case "fixed":
            return f"The operator fixed K at {estimates.k}."
        case "off":
            return "The operator switched speculation off."
        case _:
            return ""


def _reason(estimates: Estimates) -> str:
    k = estimates.k
    match estimates.reason:
        case "pays":
            return f"K = {k} promises the most tokens per second."
        case "off":
            return "No guesses promise the most tokens per second."
        case "probe":
            return f"K is 0, and a probe of {k} looks whether guesses would pay by now."
        case "trial":
            return f"K is 0, and a trial of {k} looks what guesses would cost and save by now."
        case "baseline":
            return "K is above 0, and this step plays K = 0 to compare."
        case "neighbour":
            return f"This step plays K = {k}, one off the present K, to compare."
        case "fixed":
            return f"The configuration fixes K at {k}."
        case _:
            return f"K is {k}."


def _evidence(estimates: Estimates) -> str:
    """What was compared."""
    rates, k = estimates.rates, estimates.k
    if k >= len(rates):
        return ""
    plural = "s" if estimates.num_sequences != 1 else ""
    told = f"Expected of the main proposer for {estimates.num_sequences} sequence{plural}:"
    told += f" {rates[k]:.0f} tokens/s"
    if k:
        told += f", {estimates.speedup:.2f} times those of K = 0 ({rates[0]:.0f})"
    others = [other for other in range(1, len(rates)) if other != k]
    if others:
        best = max(others, key=rates.__getitem__)
        told += f"; the best other K above 0 is {best} ({rates[best]:.0f})"
    return told + "."
