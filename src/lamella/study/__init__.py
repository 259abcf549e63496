"""What a researcher needs to believe a result: analyses, comparisons and reports, all read from run folders."""
