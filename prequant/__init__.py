"""Bake, validate and load pre-quantised checkpoints from a plan of quantpolicy."""
