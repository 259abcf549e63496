"""A model: its module, its folder on disk, its card, and how to load it."""
