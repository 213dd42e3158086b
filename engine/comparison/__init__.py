"""Arms against each other: the grid, the race, the figures, the card. No torch, no HTTP.

An arm is a way to choose K. What runs it, an engine in this process (engine.bench) or a server
somewhere (server.bench), is a `Driver`.
"""
