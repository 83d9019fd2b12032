"""Context parallel: a step runs on slices of its sequences, one a rank, whatever the model.

`steps` runs a user's step and cuts its sequences, `interpreter` answers its calls on slices, `choice` decides which
operands of a call move where, `rows` sends single rows, and `rules` has what is this axis' own.
"""
