"""Measurement of models: rows and zero rows by probing, tiny models, the shipped inventories."""
