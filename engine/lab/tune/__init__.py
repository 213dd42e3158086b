"""`foredraft tune`: what guessing gains here, in one sentence, and the configuration for it.

`estimate` has the formula of the interval, `measuring` the rounds and when they end, `settings`
what is compared and the file that is written. `python -m engine.lab.tune.check` holds intervals
against what a long bench finds.
"""
