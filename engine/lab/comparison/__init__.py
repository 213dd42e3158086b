"""Compare arms: workloads, the race, the figures, the report. No torch, no HTTP.

An arm is a way to choose K, or another system. A `race.Player` runs it: engines in this process
(engine.lab.bench) or servers (server.lab.bench).
"""
