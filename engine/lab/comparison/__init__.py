"""Arms against each other: the grid, the race, the figures, the card. No torch, no HTTP.

An arm is a way to choose K. What runs it, an engine in this process (engine.lab.bench) or a server
somewhere (server.lab.bench), is a `Driver`.
"""
