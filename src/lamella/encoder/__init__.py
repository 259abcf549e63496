"""The pretrained encoder: where it comes from, what it returns, what of it is trained."""
