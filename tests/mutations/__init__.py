"""Mutations of the engine: small mistakes, one at a time, and what notices them. `make mutations`."""
