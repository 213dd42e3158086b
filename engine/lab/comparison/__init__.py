"""Arms against each other: workloads, the race, the figures, the report. No torch, no HTTP.

An arm is a way to choose K, or another system. What plays it is a `race.Player`: engines in this
process (engine.lab.bench), or servers (server.lab.bench).
"""
