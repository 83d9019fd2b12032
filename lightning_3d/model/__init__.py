"""The user's model: its blocks, names, state, and how ranks get its initial weights."""
