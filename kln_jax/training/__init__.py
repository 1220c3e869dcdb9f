"""Training: from a configuration to a finished run, over devices and processes."""
