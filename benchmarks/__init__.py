"""Measurements of speed; none of them is a test."""
