"""What ranks say to each other, how they find each other, and how to watch one of them."""
