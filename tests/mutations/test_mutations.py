"""The tool that puts small mistakes into the engine: what it writes, what it leaves alone, who judges."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest

from mutations.__main__ import summary
from mutations.judges import (
    PYTEST,
    Finding,
    Ran,
    Tree,
    by_import_or_types,
    by_tests,
    by_verify,
    nearest,
)
from mutations.lines import Candidate, Recorded, sample
from mutations.operators import OPERATORS, Mutation, mutations_of


def written(source: str, operator: str) -> set[str]:
    """What an operator makes of a source, without the parentheses around it."""
    made = [
        one
        for one in mutations_of("x.py", source.encode())
        if one.operator == operator
    ]
    return {
        one.new[1:-1] if one.new.startswith("(") else one.new for one in made
    }


@pytest.mark.parametrize(
    ("operator", "source", "expected"),
    [
        ("arithmetic", "y = a + b", {"a - b"}),
        ("arithmetic", "y //= 2", {"y *= 2"}),
        ("arithmetic", "y = 'a' + b", set()),
        ("sign", "y = -a", {"a"}),
        ("term dropped", "y = a + b", {"a", "b"}),
        ("term dropped", "y = a / b", {"a"}),
        ("axis", "y = x.sum(-1)", {"x.sum(-2)"}),
        ("axis", "y = max(1, x)", set()),
        ("axis", "y = torch.cat(parts, dim=1)", {"torch.cat(parts, dim=0)"}),
        ("axis", "y = sizes['dp']", {"'tp'"}),
        ("comparison", "y = a < b", {"a <= b", "a >= b"}),
        ("comparison", "y = a is b", {"a is not b"}),
        ("condition", "if a and b: c()", {"a or b", "a", "b"}),
        ("condition", "y = [x for x in z if ready(x)]", {"not ready(x)"}),
        ("condition", "while not a: c()", {"a"}),
        ("constant", "y = f(3, 0.5, True, 'a')", {"4", "2", "1.0", "False"}),
        ("wait dropped", "work.wait()", {"pass"}),
        ("copy dropped", "y = x.clone()", {"x"}),
        ("dtype", "y = x.to(torch.float32)", {"torch.bfloat16", "x"}),
        ("dtype", "y = x.float()", {"x", "x.bfloat16()"}),
        ("arguments swapped", "f(a, b, c)", {"f(b, a, c)", "f(a, c, b)"}),
        ("reduction", "group.all_reduce(x, 'max')", {"'min'"}),
        ("reduction", "y = x.sum(0)", {"x.mean"}),
        ("slice", "y = x[a:b]", {":b", "a:", "a + 1:b", "a:b + 1"}),
        ("statement dropped", "f(x)", {"pass"}),
        ("statement dropped", "total += x", {"pass"}),
        ("early return", "def f(x):\n    g(x)\n    h(x)", {"return"}),
        ("early return", "def f(x):\n    g(x)\n    return x", set()),
        ("not in place", "x.add_(y)", {"x.add(y)"}),
        ("not in place", "x.view(-1).add_(y)", {"x.view(-1).add(y)"}),
        ("not in place", "z = (x - y).exp_()", set()),  # a temporary
        ("not in place", "torch.mul(x, y, out=z)", {"torch.mul(x, y)"}),
        ("order", "send(x)\nx = wait(y)", {"x = wait(y)\nsend(x)"}),
        # the second needs what the first binds
        ("order", "x = wait(y)\nsend(x)", set()),
        ("order", "a = 1\nb = 2", set()),
    ],
)
def test_an_operator_writes_what_could_stand_there_by_mistake(
    operator: str, source: str, expected: set[str]
) -> None:
    assert written(source, operator) == expected


def test_every_operator_has_an_example() -> None:
    table = (
        test_an_operator_writes_what_could_stand_there_by_mistake.pytestmark[0]
    )  # type: ignore[attr-defined]
    assert {row[0] for row in table.args[1]} == {*OPERATORS, "order"}


@pytest.mark.parametrize(
    "source",
    [
        '"""A docstring of 1 + 2."""',
        "def f(x: tuple[int, 3]) -> a[1 + 2]: ...",
        "raise ValueError(f'{a + 1} of {b}')",
        "assert a < b, 'a + 1'",
        "y = f'{a + 1}'",
        "from a import b",
        "class A:\n    def __repr__(self):\n        return self.a + 1",
    ],
)
def test_what_cannot_change_a_result_is_left_alone(source: str) -> None:
    assert mutations_of("x.py", source.encode()) == []


LONG = """\
def scale(x, rate):
    \"\"\"Übrig: letters of two bytes.\"\"\"
    y = combine(
        x + 1,
        -rate,
    )
    if y and (
        rate < 3
    ):
        y.wait()
    send(
        y,
    )
    send(x); y.close()
    return y
"""


def test_all_other_code_keeps_its_line_and_every_mutation_is_one_of_python() -> (
    None
):
    made = mutations_of("x.py", LONG.encode())
    assert len(made) > 15
    for mutation in made:
        text = mutation.applied(LONG.encode()).decode()
        compile(text, "x.py", "exec")
        assert text != LONG
        lines, rows = text.splitlines(), LONG.splitlines()
        assert len(lines) == len(rows), mutation.name
        changed = [
            n
            for n, pair in enumerate(zip(rows, lines, strict=True), 1)
            if len({*pair}) > 1
        ]
        assert {*changed} <= {*mutation.lines}, mutation.name


def test_a_mutation_keeps_its_name_where_other_lines_change() -> None:
    before = [
        mutation.name for mutation in mutations_of("x.py", LONG.encode())
    ]
    after = [
        mutation.name
        for mutation in mutations_of("x.py", b"import a\n\n\n" + LONG.encode())
    ]
    assert before == after
    assert len({*before}) == len(before)


def test_a_constant_of_a_module_is_run_by_who_reads_it_and_a_default_by_its_function() -> (
    None
):
    source = b"LIMIT = 3\n\n\ndef f(x=4):\n    y = x\n    return y\n"
    made = {
        mutation.old: mutation for mutation in mutations_of("x.py", source)
    }
    assert made["3"].binds == {"LIMIT"}
    assert made["4"].binds == frozenset()
    case = Recorded("", 1.0, {"x.py": frozenset({5})})
    assert case.runs(made["4"])
    assert not Recorded("", 1.0, {"x.py": frozenset({9})}).runs(made["4"])


def _mutation(
    path: str = "src/phalanx/training/optimizer.py",
    function: str = "learning_rate",
    **more: object,
):  # type: ignore[no-untyped-def]
    fields = {
        "operator": "constant",
        "old": "1",
        "new": "2",
        "number": 1,
        "start": 0,
        "end": 1,
    }
    return Mutation(path, function, **fields | {"lines": range(1, 2)} | more)  # type: ignore[arg-type]


def test_a_sample_is_drawn_by_its_seed_and_has_all_operators_alike() -> None:
    rare = [
        Candidate(_mutation(operator="wait dropped", number=n), ())
        for n in range(30)
    ]
    common = [Candidate(_mutation(number=n), ()) for n in range(3000)]
    order = sample([*common, *rare], 5)
    assert order == sample([*common, *rare], 5)
    assert order != sample([*common, *rare], 6)
    assert len(order) == 3030
    counts = Counter(each.mutation.operator for each in order[:40])
    assert min(counts.values()) > 10


SCRIPT = """\
import multiprocessing, threading
LIMIT = 2
def inside(x):
    y = x
    if x:
        y = 3
    return y
class Some:
    field = 1
def forked():
    return 4
if __name__ == "__main__":
    inside(0)
    thread = threading.Thread(target=inside, args=(1,))
    thread.start()
    thread.join()
    process = multiprocessing.get_context("fork").Process(target=forked)
    process.start()
    process.join()
"""


def test_lines_are_recorded_in_threads_and_processes_and_not_at_import(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    raw = tmp_path / "lines.txt"
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).parent / "recorder"),
        "RECORDED_ROOT": str(tmp_path),
        "RECORDED_LINES": str(raw),
    }
    subprocess.run(
        [sys.executable, str(script)], env=environment, check=True, timeout=60
    )
    found = Counter(raw.read_text().split())
    assert {*found} == {f"script.py:{line}" for line in (4, 5, 6, 7, 11)}


# ---- the judges, over a tree whose processes have ended already


class Ended(Tree):
    """A tree in which each run has a given end, by the last word of its command and the mutation."""

    def __init__(
        self, ends: dict[tuple[str, bool], Ran], texts: dict[Path, str]
    ) -> None:
        super().__init__(Path(), texts)
        self.ends, self.changed = ends, False

    @contextmanager
    def mutated(self, mutation: Mutation):  # type: ignore[no-untyped-def]
        self.changed = True
        yield
        self.changed = False

    def run(self, command: object, limit: float) -> Ran:
        return self.ends[command[-1], self.changed]  # type: ignore[index]


FINE = Ran(0, "", 1.0)
FILE = Path("tests/training/test_rates.py")
FAILED = Ran(
    1,
    "E  AssertionError\nFAILED tests/training/test_rates.py::test_end - assert\n",
    1.0,
)
TEST = "tests/training/test_rates.py::test_end"


def _tested(ends: dict[tuple[str, bool], Ran]) -> Finding | None:
    return by_tests(Ended(ends, {FILE: ""}), _mutation(), [FILE])


def test_a_test_that_fails_with_the_mutation_only_has_noticed_it() -> None:
    found = _tested({(str(FILE), True): FAILED, (TEST, False): FINE})
    assert found == Finding("failed", f"pytest {FILE}", TEST)


def test_a_test_whose_name_has_spaces_is_run_again_by_its_whole_name() -> None:
    name = f"{TEST}[a hook on a weight's gradient]"
    failed = Ran(1, f"FAILED {name} - AssertionError: 1 - 2\n", 1.0)
    found = _tested({(str(FILE), True): failed, (name, False): FINE})
    assert found == Finding("failed", f"pytest {FILE}", name)


def test_a_test_that_fails_without_the_mutation_says_nothing() -> None:
    assert _tested({(str(FILE), True): FAILED, (TEST, False): FAILED}) is None


def test_a_test_that_hangs_has_noticed_a_mutation_and_one_that_is_slow_has_not() -> (
    None
):
    late, half = Ran(None, "", 900.0), Ran(None, "", 450.0)
    found = _tested({(str(FILE), True): late, (str(FILE), False): FINE})
    assert found
    assert found.how == "hung"
    assert _tested({(str(FILE), True): late, (str(FILE), False): half}) is None


DIFFERS = '{"layouts": [{"layout": "dp2", "passed": true, "first_difference": ""}, {"layout": "tp2",'
DIFFERS += ' "passed": false, "first_difference": "step 0: the loss is 1.0"}]}'
RAISED = DIFFERS.replace(
    "step 0: the loss is 1.0", "rank 1 failed: KeyError: 3"
)
TRACE = "Traceback (most recent call last):\n  File x\nKeyError: 3"


@pytest.mark.parametrize(
    ("ran", "how", "said"),
    [
        (Ran(1, DIFFERS, 1.0), "differs", "tp2: step 0: the loss is 1.0"),
        (Ran(1, RAISED, 1.0), "raised", "tp2: rank 1 failed: KeyError: 3"),
        (Ran(1, TRACE, 1.0), "raised", "KeyError: 3"),
        (
            Ran(2, "LayoutError: tp2 does not fit", 1.0),
            "refused",
            "LayoutError: tp2 does not fit",
        ),
        (Ran(None, "", 130.0), "hung", "not done after 130 s"),
    ],
)
def test_what_verify_says_of_a_mutation(ran: Ran, how: str, said: str) -> None:
    case = Recorded("--model gqa", 1.0, {})
    tree = Ended({("gqa", False): ran}, {FILE: ""})
    assert by_verify(tree, case) == Finding(
        how, "phalanx verify --model gqa", said
    )


def test_verify_that_agrees_has_noticed_nothing() -> None:
    case = Recorded("--model gqa", 1.0, {})
    assert by_verify(Ended({("gqa", False): FINE}, {FILE: ""}), case) is None


def test_mistakes_that_show_at_import_or_to_mypy_are_obvious() -> None:
    wrong, last = (
        Ran(1, "x.py:1: error: no such name\nx.py:2: error: none", 1.0),
        "--no-error-summary",
    )
    tree = Ended({(IMPORT, False): FINE, (last, False): wrong}, {FILE: ""})
    assert by_import_or_types(tree) == Finding(
        "types", "mypy", "x.py:1: error: no such name"
    )
    tree = Ended({(IMPORT, False): Ran(1, TRACE, 1.0)}, {FILE: ""})
    assert by_import_or_types(tree) == Finding(
        "import", "import", "KeyError: 3"
    )
    tree = Ended({(IMPORT, False): FINE, (last, False): FINE}, {FILE: ""})
    assert by_import_or_types(tree) is None


IMPORT = "import phalanx.cli.main, phalanx.cli.verify, phalanx.training.loop, phalanx.comm.launch"


def test_the_nearest_tests_name_the_function_its_file_or_its_package() -> None:
    texts = {
        FILE: "from phalanx.training.optimizer import learning_rate",
        Path(
            "tests/training/test_optimizer.py"
        ): "from phalanx.training import optimizer",
        Path(
            "tests/training/test_lock.py"
        ): "from phalanx.training.lock import Lock",
        Path(
            "tests/drawing/test_pages.py"
        ): "from phalanx.drawing import page",
    }
    found = nearest(Ended({}, texts), _mutation(), 9)
    assert [path.name for path in found] == [
        "test_optimizer.py",
        "test_rates.py",
        "test_lock.py",
    ]


def test_a_copy_of_the_tree_is_changed_and_restored(tmp_path: Path) -> None:
    path = tmp_path / "src" / "phalanx" / "training" / "optimizer.py"
    path.parent.mkdir(parents=True)
    path.write_text("1 + 1\n")
    before = path.stat().st_mtime_ns
    with Tree(tmp_path).mutated(_mutation()):
        assert path.read_text() == "2 + 1\n"
    assert path.read_text() == "1 + 1\n"
    assert path.stat().st_mtime_ns == before


def test_a_run_that_does_not_end_is_ended_with_what_it_started(
    tmp_path: Path,
) -> None:
    code = "import subprocess, time; subprocess.Popen(['sleep', '600']);"
    code += " print('begun', flush=True); time.sleep(600)"
    ran = Tree(tmp_path).run([sys.executable, "-c", code], 5.0)
    assert ran.code is None
    assert ran.output == "begun\n"


def test_the_summary_counts_by_package_and_leaves_out_what_is_obvious() -> (
    None
):
    def result(package: str, by: str, how: str = "") -> dict[str, str]:
        return {
            "name": f"{by} in {package}",
            "package": package,
            "by": by,
            "how": how,
            "diff": "-a",
        }

    rows = [result("models", "verify", "differs")] * 3 + [
        result("models", "survived")
    ]
    rows += [
        result("verification", "tests", "failed"),
        result("models", "obvious", "types"),
    ]
    said = summary(rows)
    assert "| models | 4 | 3 (75%) | 3 (75%) | 1 |" in said
    assert "| all but verification | 4 | 3 (75%) | 3 (75%) | 1 |" in said
    assert "| all | 5 | 3 (60%) | 4 (80%) | 1 |" in said
    assert "verify differs 3" in said
    assert "survived in models\n-a" in said


def test_tests_are_run_without_a_cache_and_stop_at_the_first_failure() -> None:
    assert {"-x", "no:cacheprovider"} <= {*PYTEST}
