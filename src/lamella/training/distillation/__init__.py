"""Objectives with a teacher."""
