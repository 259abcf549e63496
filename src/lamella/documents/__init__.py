"""Documents: files as text with pages or lines, cut into passages that are ranked for a question."""
