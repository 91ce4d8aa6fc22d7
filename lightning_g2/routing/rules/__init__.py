"""Staleness rules, one a file."""
