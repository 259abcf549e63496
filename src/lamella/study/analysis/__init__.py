"""What runs get right and wrong."""
