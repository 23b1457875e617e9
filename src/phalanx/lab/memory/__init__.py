"""The same step with fewer bytes: computed again, written shorter, or kept elsewhere."""
