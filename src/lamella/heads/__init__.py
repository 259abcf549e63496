"""What is put on the hidden layers: mixers, tasks, losses."""
