"""One quantisation plan per diffusion model and machine. Importing this never imports torch."""
