"""One layer's work is shared out: by features, by heads, or along the sequence."""
