"""Sweeps: many runs trained in order, on this machine or on a Ray cluster."""
