"""Decoupled forward and backward threads (PD-ASGD) under the Trainer: its loop, its hooks and the server's protocol."""
