"""Layers are dealt out to ranks, and what is between them travels."""
