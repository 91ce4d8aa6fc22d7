"""Asynchronous training for PyTorch Lightning, routed on the Lie algebra g2."""
