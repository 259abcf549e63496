"""Compare, analyse and report finished runs; everything here reads run folders or result files."""
