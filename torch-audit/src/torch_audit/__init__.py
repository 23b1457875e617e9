"""Records a step of any torch program on all of its ranks, and compares it with another layout."""
