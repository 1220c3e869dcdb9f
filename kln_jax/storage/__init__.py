"""What a run writes: whole files, checkpoints, metrics and its working directory."""
