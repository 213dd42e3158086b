"""`foredraft evaluate`: does speculation pay for these prompts, on this machine?"""
