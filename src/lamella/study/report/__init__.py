"""Reports about runs, in HTML and Markdown."""
