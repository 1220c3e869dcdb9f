"""Trained networks: KLN for scikit-learn, and commands that predict and export."""
