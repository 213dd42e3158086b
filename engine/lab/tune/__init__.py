"""`foredraft tune`: what speculation gains on this machine, in one sentence and a configuration.

`measuring` has the rounds and their end, `settings` the compared settings and the written file.
"""
