"""`foredraft tune`: what speculation gains on this machine, in one sentence and a configuration.

`estimate` has the formula of the interval, `measuring` the rounds and their end, `settings` the
compared settings and the written file.
"""
