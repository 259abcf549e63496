"""From logits to answers and scores."""
