"""Analyses of what runs get right and wrong."""
