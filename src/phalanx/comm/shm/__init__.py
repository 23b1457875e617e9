"""Groups over shared memory: ranks that are processes of one machine."""
