"""Which torch function calls inside a block have a meaning for tensor parallel, and what that meaning is.

Planning (`follow`) and execution (`sharded_calls`) watch the same calls with a ``TorchFunctionMode`` and must take the
same decisions, so the decisions stand here, without a tensor being touched. A "call" is one call that user code makes
of a torch function, operator or tensor method.
"""
