"""The data doctor: find, describe and fix what is wrong with examples."""
