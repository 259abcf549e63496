"""From examples to windows of tokens and padded batches."""
