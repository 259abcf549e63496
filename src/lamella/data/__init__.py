"""From files to batches: examples, readers, the data doctor, windows, length buckets."""
