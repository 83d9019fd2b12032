"""The steps of a parallel model, as Lightning calls them."""
