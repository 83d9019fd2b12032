"""Computing on shards over one axis of the mesh, whichever that is: the same code on every rank, on parts of tensors.

`placement` says how a tensor lies, `collectives` how it comes to lie otherwise, `rules` how every rank makes a call on
what it has, and `interpret` carries that out.
"""
