"""A model of which each rank holds a part, in the hands of code that takes it for the full one.

`part_tensor` is a parameter of which this rank has a part, and `elementwise` lists what needs no more of it;
`model.absent` is one that another pipeline stage has, and `stages` send each other values. `module` answers for a
module of such parameters, `copies` are its copies, `full_params` makes it full, and `layout` tells who split it.
"""
