"""A saved model written in other forms."""
