"""Every rank works on rows of its own and holds only a part of what the others hold too."""
