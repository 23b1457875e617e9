"""Numbers as people write them: bytes, rates, times and counts, to text and from text.

No other file does this. Amounts of data are decimal (1 GB = 1e9 bytes), as for links
and files (`bytes_text`). `binary_text` is for memory and message sizes, which come in
powers of two (80 GiB).
"""

import re
from decimal import Decimal

MOST = 10**18  # the largest count
_COUNT = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)([kKMGBT]|[KMGT]i)?")
_SI = ("", "k", "M", "G", "T", "P", "E")
_BINARY = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")


class NumberError(ValueError):
    """Raised for a text that is not a number of the required kind."""


def _scaled(
    number: float,
    prefixes: tuple[str, ...] = _SI,
    base: float = 1000.0,
    digits: int = 3,
) -> str:
    """`8.03 G`: a number of digits, a space and the prefix."""
    limit = base - 0.5 * (digits == 3)  # 999.7 would be printed as 1e+03
    for prefix in prefixes[:-1]:
        if abs(number) < limit:
            return f"{number:.{digits}g} {prefix}"
        number /= base
    return f"{number:.{digits}g} {prefixes[-1]}"


def si_text(number: float) -> str:
    """`54.4T`, `1.12G`: three digits and a letter."""
    return _scaled(number).replace(" ", "")


def count_text(number: float) -> str:
    """Parameters and tokens: `124.4M`, `8.03B`."""
    return _scaled(number, digits=4).replace(" ", "").replace("G", "B")


def bytes_text(count: float) -> str:
    """`1.12 GB`, `96 B`."""
    return _scaled(count) + "B"


def binary_text(count: float) -> str:
    """`80 GiB`, `96 B`."""
    return _scaled(count, _BINARY, 1024.0, digits=4) + "B"


def rate_text(per_second: float) -> str:
    """Bytes per second: `25 GB/s`, `3352 GB/s`, `12.3 TB/s`. Links and memories are
    compared in GB/s.
    """
    if not per_second:
        return "unknown"
    # From 10 TB/s on in TB/s: below, links and memories are compared in GB/s.
    power, unit = (1e12, "TB/s") if per_second >= 1e13 else (1e9, "GB/s")
    x = per_second / power
    return f"{x:.0f} {unit}" if x >= 100 else f"{x:.3g} {unit}"


def flops_text(per_second: float) -> str:
    """Operations per second in TFLOP/s; GFLOP/s for small and EFLOP/s for large rates."""
    for power, unit in ((1e18, "E"), (1e12, "T")):
        if (x := per_second / power) >= 0.1:
            return (
                f"{x:.1f} {unit}FLOP/s"
                if x >= 100
                else f"{x:.3g} {unit}FLOP/s"
            )
    return f"{per_second / 1e9:.3g} GFLOP/s"


def seconds_text(time: float) -> str:
    """`8.83 s`, `412 ms`, `3.1 us`: three digits; thousands of seconds in full."""
    # With three digits this would be printed as 1e+03.
    if time >= 999.5:
        return f"{time:,.0f} s"
    for power, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if time >= power:
            return f"{time / power:.3g} {unit}"
    return f"{time / 1e-9:.3g} ns"


def parse_bytes(text: str) -> int:
    """Parse a size in bytes: `1K` is 1,024 bytes, `64M` 64 MiB."""
    match = re.fullmatch(r"([0-9]{1,15})([KMGT]?)(?:i?B)?", text.strip())
    if not match or not int(match[1]):
        raise NumberError(
            f"{text[:60]!r} is not a size; write 4096, 64K, 512M or 1G."
        )
    # A shift by 10 bits for each prefix: K is 2^10 bytes, M 2^20.
    return int(match[1]) << 10 * " KMGT".index(match[2] or " ")


def parse_byte_sizes(text: str, step: int = 4) -> tuple[int, ...]:
    """Parse sizes: a range in steps of 4 (`1K:64M`), of 2 (`1K:64M:2`), or a list."""
    if ":" not in text:
        return tuple(sorted({parse_bytes(part) for part in text.split(",")}))
    first, last, *steps = text.split(":")
    low, high = parse_bytes(first), parse_bytes(last)
    word = ":".join(steps) if steps else str(step)
    factor = int(word) if re.fullmatch("[0-9]{1,9}", word) else 0
    if low > high or factor < 2:
        raise NumberError(
            f"{text[:60]!r} is not a range of sizes; write FIRST:LAST or FIRST:LAST:STEP."
        )
    sizes = [low]
    while sizes[-1] * factor <= high:
        sizes.append(sizes[-1] * factor)
    # The end of the range belongs to it, even if no step leads there.
    return (*sizes, high) if sizes[-1] < high else tuple(sizes)


def parse_count(text: str) -> int:
    """Parse a count with a unit: `4M` is 4,000,000, `4Mi` is 4,194,304."""
    match = _COUNT.fullmatch(text)
    if not match or not float(match[1]):
        raise NumberError(
            f"is {text[:60]!r}; write a number such as 4M (4,000,000), 4Mi (4,194,304) or 4194304."
        )
    # Decimal keeps what was written, where a binary fraction would be rounded.
    number = Decimal(match[1]) * _unit(match[2] or "")
    if number > MOST:
        raise NumberError(f"is {text[:60]}; write {MOST:,} or less.")
    if number != int(number):
        raise NumberError(
            f"is {text[:60]}, {number.normalize():f}; write a whole number."
        )
    return int(number)


def parse_length(text: str) -> int:
    """Parse the tokens of a sequence: `4096` or `4Ki`.

    `4k` is refused: most who write it mean 4,096, and everywhere else it is 4,000.
    """
    if re.fullmatch("[0-9]{1,18}(?:[KMGT]i)?", text) and float(
        text.rstrip("KMGTi")
    ):
        return parse_count(text)
    raise NumberError(
        f"is {text[:60]!r}; write {whole_spellings(text) or 'a whole number'}."
    )


def whole_spellings(text: str) -> str:
    """Spell a count such as `4k` as plain numbers: `4000 or 4096 (4Ki)`; or ""."""
    match = re.fullmatch("([1-9][0-9]{0,8})([kKMGT])(i?)", text)
    if not match:
        return ""
    # "4k" may mean 4,000 or 4,096; "4Ki" only the latter.
    letter = match[2].upper()
    binary = int(match[1]) * _unit(f"{letter}i")
    if match[3]:
        return str(binary)
    return f"{int(match[1]) * _unit(letter)} or {binary} ({match[1]}{letter}i)"


def _unit(letters: str) -> int:
    """The factor of the letters after a count: 1,000 for k, 1,024 for Ki."""
    power = " KMGT".index(letters[:1].upper().replace("B", "G") or " ")
    base = 1024 if letters.endswith("i") else 1000
    return int(base**power)
