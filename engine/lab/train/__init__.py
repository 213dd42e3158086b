"""Train proposers for a frozen target: `foredraft train draft`, `medusa`, `eagle`, and parts of
`train demo`.

data.py (rows of token ids, also those that the target writes) -> learning.py (loss, optimizer,
steps until the budget is used up) -> agreement.py (the report). program.py has what the programs
share, including checkpoints. Each program trains one kind: draft.py, medusa.py, eagle.py.
"""
