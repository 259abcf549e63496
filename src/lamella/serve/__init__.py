"""Serve readers: an HTTP service that answers the questions of many clients with many readers."""
