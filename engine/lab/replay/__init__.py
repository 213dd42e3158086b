"""What other policies would have done: the same requests, decided anew, on a clock of costs.

Under sample-and-match a guess is right or wrong whatever else was guessed, so one bit and one
confidence per generated position suffice to play any controller. `streams`: those bits. `costs`:
what a forward takes. `worlds`: both, drawn at random. `run`: the step loop, with the protocol that
the engine uses. `references`: what to compare with. `python -m engine.lab.simulate` plays worlds.
"""
