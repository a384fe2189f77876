"""Inventories: what a component is made of, read live, from a config, from headers or shipped."""
