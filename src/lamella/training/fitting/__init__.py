"""The training loop and everything that it drives."""
