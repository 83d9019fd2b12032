"""The rules of computing on shards: how each rank makes a call of a torch function on its own shards.

`table` names the rules per function. `interpret` consults it alike in planning and in running, so both take the same
decisions. No rule communicates. A "call" is one call that user code makes of a torch function, operator or tensor
method.
"""
