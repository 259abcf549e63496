"""From a run file to a trained model."""
