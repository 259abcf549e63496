"""What to believe of results and what to choose: everything here reads run folders."""
