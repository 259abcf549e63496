"""Studies of many runs: sweeps, comparisons and reports, which read and write run folders."""
