"""Models and data modules of the shipped experiments; import them from their own modules."""
