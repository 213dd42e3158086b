"""What other policies would have done: the same requests, decided anew, on a clock of costs.

Under sample-and-match a guess is right or wrong whatever else was guessed, so one bit and one
confidence per generated position suffice to play any controller. `play`: the step loop, with the
protocol that the engine uses. `recorded` and `costs`: a trace's requests and times. `worlds`: both,
drawn at random, for `python -m engine.lab.simulate`. `variants`: policies by name. `scores`: how
they compare.
"""
