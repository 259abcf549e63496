"""Reports of runs, in HTML and Markdown."""
