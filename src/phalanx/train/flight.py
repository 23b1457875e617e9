"""NCCL's calls as torch's flight recorder has them, as text for the file about a hang."""

import torch


def flight_record() -> bytes:
    """The record of this process as JSON; empty where this build of torch keeps none.

    What a call's state is the recorder asks the device, which may not answer: call this from a thread
    that nothing waits for.
    """
    module = torch._C._distributed_c10d
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        dump = getattr(module, name, None)
        if dump is not None:
            found = dump(includeCollectives=True, onlyActive=False)
            return found if isinstance(found, bytes) else str(found).encode()
    return b""
