"""Data files: from bytes to examples and back."""
