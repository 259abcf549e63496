"""Score answers: metrics, thresholds, significance, cost."""
