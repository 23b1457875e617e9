"""Files of the user's own, read by all ranks of a world of threads."""

import gc
import threading
import time
from pathlib import Path

from phalanx.layout.source import imported_sources

OWN = "".join(
    f"def f{n}(a, b):\n    return [a + {n}, (b, -a), {{'k': a * b}}]\n"
    for n in range(300)
)


def test_ranks_that_are_threads_read_the_same_file_at_once(
    tmp_path: Path,
) -> None:
    """A collection of garbage lets another thread in while Python builds the tree of a file."""
    (tmp_path / "helper.py").write_text("")
    file = tmp_path / "model.py"
    file.write_text(f"import helper\n{OWN}")
    found: list[list[str]] = []

    def let_others_run(phase: str, info: dict[str, int]) -> None:
        time.sleep(0)

    def at_depth(left: int) -> None:
        if left:
            at_depth(left - 1)
        else:
            found.append(list(imported_sources(file)))

    before = gc.get_threshold()
    gc.callbacks.append(let_others_run)
    gc.set_threshold(50)
    try:
        threads = [
            threading.Thread(target=at_depth, args=(10 * n,)) for n in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(let_others_run)
    assert found == [["helper"]] * 4
