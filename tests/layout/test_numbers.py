"""Numbers to text and back."""

from __future__ import annotations

import pytest

from phalanx.layout.numbers import (
    NumberError,
    binary_text,
    bytes_text,
    count_text,
    flops_text,
    parse_byte_sizes,
    parse_bytes,
    parse_count,
    parse_length,
    rate_text,
    seconds_text,
    si_text,
)


def test_sizes_are_read_as_people_write_them() -> None:
    assert [parse_bytes(t) for t in ("7", "1K", "512M", "2GiB")] == [
        7,
        1024,
        512 << 20,
        2 << 30,
    ]
    assert parse_byte_sizes("1K:64K") == (1024, 4096, 16384, 65536)
    assert parse_byte_sizes("1K:6K:2") == (1024, 2048, 4096, 6144)
    assert parse_byte_sizes("8K,1K") == (1024, 8192)
    for wrong in (
        "",
        "0",
        "-1K",
        "1X",
        "4K:1K",
        "1K:4K:1",
        "1K:4K:x",
        "1:2:3:4",
    ):
        with pytest.raises(NumberError):
            parse_byte_sizes(wrong)


def test_counts_are_read_as_people_write_them() -> None:
    assert [parse_count(t) for t in ("131072", "4M", "1.5k", "2B", "1T")] == [
        131072, 4 * 10**6, 1500, 2 * 10**9, 10**12,
    ]  # fmt: skip
    assert [parse_count(t) for t in ("4Mi", "1.5Ki", "2.3M", "1Ti", "0.1k")] == [
        2**22, 1536, 2_300_000, 2**40, 100,
    ]  # fmt: skip
    for wrong in (
        "",
        "0",
        "-1",
        "4X",
        "1e6",
        "10000000T",
        "9" * 30,
        "4mi",
        "4Bi",
        "0.5",
        "1.0001k",
    ):
        with pytest.raises(NumberError):
            parse_count(wrong)


def test_the_length_of_a_sequence_is_exact_and_4k_is_refused_with_both_of_its_meanings() -> (
    None
):
    assert [parse_length(t) for t in ("1", "4096", "4Ki", "128Ki", "1Mi")] == [
        1, 4096, 4096, 131072, 1048576,
    ]  # fmt: skip
    for text, meant in (
        ("4k", r"4000 or 4096 \(4Ki\)"),
        ("128K", r"128000 or 131072 \(128Ki\)"),
    ):
        with pytest.raises(NumberError, match=meant):
            parse_length(text)
    for wrong in ("", "0", "0Ki", "-4", "4.5Ki", "4B", "four", "4i"):
        with pytest.raises(NumberError, match="write a whole number"):
            parse_length(wrong)


@pytest.mark.parametrize(
    ("write", "numbers", "texts"),
    [
        (
            binary_text,
            (96, 80 * 2**30, 1.875 * 2**50),
            ["96 B", "80 GiB", "1.875 PiB"],
        ),
        (
            bytes_text,
            (512, 8.4e6, 1.12e9, 999.7e9),
            ["512 B", "8.4 MB", "1.12 GB", "1 TB"],
        ),
        (
            rate_text,
            (3352e9, 33.5e12, 0.2e9),
            ["3352 GB/s", "33.5 TB/s", "0.2 GB/s"],
        ),
        (
            seconds_text,
            (2.5, 0.0123, 4.5e-6, 6e-8, 12345),
            ["2.5 s", "12.3 ms", "4.5 us", "60 ns", "12,345 s"],
        ),
        (
            flops_text,
            (989.4e12, 24.3e18, 5e9),
            ["989.4 TFLOP/s", "24.3 EFLOP/s", "5 GFLOP/s"],
        ),
        (count_text, (17, 124.4e6, 8.03e9), ["17", "124.4M", "8.03B"]),
        (si_text, (999, 54.4e12, 1.12e9), ["999", "54.4T", "1.12G"]),
    ],
)
def test_numbers_are_written_as_people_do(write, numbers, texts) -> None:
    assert [write(number) for number in numbers] == texts
