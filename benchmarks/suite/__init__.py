"""What the benchmarks share: the list of them, the work that each does at least, and the page of results."""
