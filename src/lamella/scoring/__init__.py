"""Scores of answers: metrics, thresholds, significance, cost."""
