"""Heads on the hidden layers of an encoder: mixers, tasks and losses."""
