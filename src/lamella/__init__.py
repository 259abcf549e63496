"""Extractive question answering from every layer of a pretrained encoder, trained thin."""

from lamella.version import __version__

__all__ = ["__version__"]
