"""Answer questions: from a model's logits to n-best lists, and the `Reader` that users call."""
