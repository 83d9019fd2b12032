"""Every private symbol of torch, Lightning and torchmetrics that this package uses, one small adapter per concern.

``tests/test_torch_internals.py`` has canaries of those that an upgrade could change with no other test failing.
Symbols on the paths of a step are handed on as they are, so that an adapter costs no Python call.
"""

from lightning_3d.torch_internals.versions import warn_of_untested

warn_of_untested()
