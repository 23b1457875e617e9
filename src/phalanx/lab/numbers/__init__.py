"""Where ranks sit, and how much everything weighs."""
