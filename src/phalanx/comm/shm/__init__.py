"""Groups over shared memory: ranks that are processes of one machine.

`local` is the world that the launcher makes, `backend` the same for torch.distributed. Below them:
`arena` the memory, `lines` the calls of a group in their order, `rounds` the collectives, `watch`
waiting.
"""
