"""The rules of tensor parallel: how each rank makes a call of a torch function on its own shards.

`table` names the rules per function. `interpret` consults it alike in planning (`simulate`) and in running
(`sharded_forward`), so both take the same decisions. No rule communicates. A "call" is one call that user code makes
of a torch function, operator or tensor method.
"""
