"""Cost of a training run in device hours and money, including failures and checkpoints.

With N devices that each fail once in M seconds, the run fails every M / N. It then loses its work
since the last checkpoint, while frequent checkpoints cost time too. The best interval is that of
Young (1974), sqrt(2 d M / N) for a checkpoint of d seconds, refined by Daly (2006).
"""

import math
from dataclasses import dataclass

# Grattafiori et al. 2024, The Llama 3 Herd of Models, section 3.3.4: 419 unexpected interruptions
# in 54 days on 16,384 GPUs, one in 50,700 hours of a device.
MTBF_HOURS = 54 * 24 * 16384 / 419


@dataclass(frozen=True)
class Spending:
    """The time and cost of a run, in wall-clock hours unless stated otherwise."""

    steps: int
    computing: float  # hours without a failure or a checkpoint
    interval: float  # seconds between checkpoints
    failures: float  # expected
    checkpoints: float
    lost: float  # hours computed twice or spent on restarts
    saving: float  # hours for which checkpoints block training
    devices: int
    price: float  # of one device hour

    @property
    def hours(self) -> float:
        return self.computing + self.lost + self.saving

    @property
    def device_hours(self) -> float:
        return self.hours * self.devices

    @property
    def money(self) -> float:
        return self.device_hours * self.price

    @property
    def goodput(self) -> float:
        """The share of the time that advances training."""
        return self.computing / self.hours


# A checkpoint has float32 weights and two moments of each parameter, in bytes.
SAVED = 12.0
_DISK = 1e9  # bytes per second that each device is assumed to write


def saving_seconds(parameters: float, devices: int) -> float:
    """Seconds for which a checkpoint blocks training, if nobody has measured it."""
    return max(1.0, SAVED * parameters / devices / _DISK)


def interval(saving: float, between: float) -> float:
    """The optimal seconds between two checkpoints: Daly 2006, eq. 37."""
    # Daly's formula holds for checkpoints of less than twice the time between
    # failures.
    if saving >= 2 * between:
        return between
    x = saving / (2 * between)
    return (
        math.sqrt(2 * saving * between) * (1 + math.sqrt(x) / 3 + x / 9)
        - saving
    )


def spending(
    *, tokens: float, batch_tokens: float, step: float, devices: int, price: float,
    mtbf_hours: float = MTBF_HOURS, saving: float, restart: float,
) -> Spending:  # fmt: skip
    """The cost of a run of `tokens` with steps of `step` seconds.

    `saving`: seconds for which a checkpoint blocks training. `restart`: seconds from a
    failure until the next step begins.
    """
    steps = math.ceil(tokens / batch_tokens)
    computing = steps * step
    between = 3600 * mtbf_hours / devices
    every = interval(saving, between)
    checkpoints = computing / every
    # Failures also strike while lost work is recomputed, which makes the run longer in
    # turn.
    each = restart + (every + saving) / 2
    busy = computing + checkpoints * saving
    # If a failure costs more than the time between failures, the run never
    # ends.
    whole = busy / (1 - each / between) if each < between else math.inf
    failures = whole / between
    return Spending(
        steps=steps,
        computing=computing / 3600,
        interval=every,
        failures=failures,
        checkpoints=checkpoints,
        lost=(whole - busy) / 3600,
        saving=checkpoints * saving / 3600,
        devices=devices,
        price=price,
    )
