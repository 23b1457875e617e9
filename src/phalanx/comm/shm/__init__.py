"""Groups over shared memory: ranks that are processes of one machine.

`local` is the world that the launcher makes, `backend` the same for torch.distributed. Below them:
`arena` the memory, `table` a group's part of it, `rounds` the collectives, `little` small
all-reduces, `watch` waiting.
"""
