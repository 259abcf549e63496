"""The tables of the papers beside the runs of their rows: published values, findings, and verdicts on them."""
