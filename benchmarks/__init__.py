"""Measurements that the documentation quotes; none of them is a test."""
