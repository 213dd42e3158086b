"""Replay recorded requests under other policies, on a clock that adds up modelled costs.

Under sample-and-match, a draft token is right or wrong independently of all others, so one bit and
one confidence per generated position suffice to run any controller. `play`: the step loop, with the
engine's controller protocol. `recorded` and `costs`: requests and times from a trace. `worlds`:
random ones, for `python -m engine.lab.simulate`. `variants`: policies by name. `scores`: their
comparison.
"""
