"""From files to batches: formats, examples, the data doctor, windows, length buckets."""
