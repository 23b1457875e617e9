"""Every rank holds the whole model and works on rows of its own."""
