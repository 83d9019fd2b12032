"""Running a block on shards."""
