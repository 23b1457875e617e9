"""The NCCL flight recorder of torch, as text for the report about a hang."""

import torch


def flight_record() -> bytes:
    """Return the flight record of this process as JSON; empty if this build of torch
    has none.

    The recorder queries the device for the state of calls, and the device may not
    answer. Call this from a thread that nothing waits for.
    """
    module = torch._C._distributed_c10d
    # Versions of torch have one or the other.
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        dump = getattr(module, name, None)
        if dump is not None:
            found = dump(includeCollectives=True, onlyActive=False)
            return found if isinstance(found, bytes) else str(found).encode()
    return b""
