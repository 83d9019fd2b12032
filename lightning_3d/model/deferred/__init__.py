"""Building a model without holding it: parameters whose data is computed when it is first needed, bit for bit the same.

[Note: deferred initialisation]
The user's construction code runs as it is, on real data, so whatever it does (QR, ``.std()``, ``.item()``, copies
between weights, rejection sampling) is right, and so is the order in which it draws random numbers. ``defer_init``
records every operator that writes a large storage, with the state of the generators if it draws, and frees storages
that were not used for a while; one that is used again is recomputed first. In the end large parameters and buffers
become ``DeferredTensor``s, which hold the record instead of data. A rank touches those of its own stage only.

What can't be recomputed (data from files, numpy or another thread) is kept in memory, as without all this.
"""

from lightning_3d.model.deferred.recording import defer_init
from lightning_3d.model.deferred.replay import fingerprint, hash_of
from lightning_3d.model.deferred.tensor import DeferredTensor, attributes, has_deferred

__all__ = ["DeferredTensor", "attributes", "defer_init", "fingerprint", "has_deferred", "hash_of"]
