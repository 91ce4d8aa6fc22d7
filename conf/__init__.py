"""Hydra configuration of lightning_g2 (YAML files only)."""
