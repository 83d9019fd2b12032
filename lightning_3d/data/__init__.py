"""Data of a fit: an example batch, what ranks of a replica compare, and where a resumed run goes on."""
