"""Small mistakes that a source file may contain: each operator rewrites one node of its syntax tree.

An operator is a generator: it takes a node and yields what could stand in its place. `mutations_of`
applies all of them to a file. What cannot change a result is left alone: annotations, messages,
assertions, docstrings and the text of `raise`.
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

Operator = Callable[[Any], Iterator[ast.AST]]
OPERATORS: dict[str, Operator] = {}

ARITHMETIC: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
# The comparison that differs at the boundary, and the one that is opposite.
COMPARISONS: dict[type, tuple[type, ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
REDUCTIONS = {
    "sum": "mean",
    "mean": "sum",
    "amax": "amin",
    "amin": "amax",
    "max": "min",
    "min": "max",
    "any": "all",
    "all": "any",
    "average": "sum",
}
DTYPES = {
    "float64": "float32",
    "float32": "bfloat16",
    "bfloat16": "float16",
    "float16": "bfloat16",
    "int64": "int32",
}
AXES = {"dp": "tp", "tp": "dp", "cp": "tp", "ep": "dp", "pp": "dp"}
# Methods and functions whose whole numbers are dimensions.
TAKES_DIMS = {
    "amax", "amin", "argmax", "argsort", "cat", "chunk", "cumsum", "flatten", "flip", "gather",
    "index_add_", "index_select", "logsumexp", "max", "mean", "movedim", "narrow", "roll", "select",
    "size", "softmax", "sort", "split", "squeeze", "stack", "sum", "topk", "transpose", "unbind",
    "unflatten", "unsqueeze",
}  # fmt: skip
COPIES = {"clone", "contiguous", "detach"}
WAITS = {"wait", "flush", "synchronize", "barrier"}


def operator(name: str) -> Callable[[Operator], Operator]:
    def enter(function: Operator) -> Operator:
        OPERATORS[name] = function
        return function

    return enter


def _with(node: ast.AST, **fields: Any) -> ast.AST:
    """A copy of a node with some fields replaced."""
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new


def _method(node: ast.AST) -> str:
    """The last name of what a call calls, or ""."""
    if not isinstance(node, ast.Call):
        return ""
    called = node.func
    return (
        called.attr
        if isinstance(called, ast.Attribute)
        else getattr(called, "id", "")
    )


def _receiver(call: ast.Call) -> ast.expr | None:
    called = call.func
    return called.value if isinstance(called, ast.Attribute) else None


def _integer(node: ast.AST) -> int | None:
    """The value of an integer that is written out, with its sign."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _integer(node.operand)
        return None if value is None else -value
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    return None


def _text(node: ast.AST) -> bool:
    parts = ast.walk(node)
    return any(
        isinstance(part, ast.JoinedStr) or _is_string(part) for part in parts
    )


def _is_string(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


@operator("arithmetic")
def arithmetic(node: Any) -> Iterator[ast.AST]:
    if isinstance(node, ast.BinOp | ast.AugAssign) and not _text(node):
        other = ARITHMETIC.get(type(node.op))
        if other:
            yield _with(node, op=other())


@operator("sign")
def sign(node: Any) -> Iterator[ast.AST]:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield node.operand


@operator("term dropped")
def term_dropped(node: Any) -> Iterator[ast.AST]:
    if isinstance(node, ast.BinOp) and isinstance(
        node.op, ast.Add | ast.Sub | ast.Mult | ast.Div
    ):
        if not _text(node):
            yield node.left
        if not _text(node) and not isinstance(node.op, ast.Div):
            yield node.right


@operator("axis")
def axis(node: Any) -> Iterator[ast.AST]:
    if isinstance(node, ast.Constant) and node.value in AXES:
        yield ast.Constant(AXES[node.value])
    if (
        not isinstance(node, ast.Call)
        or _method(node) not in TAKES_DIMS
        or not _receiver(node)
    ):
        return  # Python's own max and sum take no dims
    for place, argument in enumerate(node.args):
        dim = _integer(argument)
        if dim is not None:
            changed = [*node.args]
            changed[place] = ast.Constant(_other_dim(dim))
            yield _with(node, args=changed)
    for place, keyword in enumerate(node.keywords):
        dim = _integer(keyword.value)
        if keyword.arg in ("dim", "dims") and dim is not None:
            named = [*node.keywords]
            named[place] = ast.keyword(
                keyword.arg, ast.Constant(_other_dim(dim))
            )
            yield _with(node, keywords=named)


def _other_dim(dim: int) -> int:
    return dim - 1 if dim else -1


@operator("comparison")
def comparison(node: Any) -> Iterator[ast.AST]:
    if isinstance(node, ast.Compare):
        for place, op in enumerate(node.ops):
            for other in COMPARISONS[type(op)]:
                changed = [*node.ops]
                changed[place] = other()
                yield _with(node, ops=changed)


@operator("condition")
def condition(node: Any) -> Iterator[ast.AST]:
    """Negated where it decides; of conditions that are joined the other way to join, or all but one."""
    if isinstance(node, ast.BoolOp):
        other = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
        yield _with(node, op=other)
        for place in range(len(node.values)):
            rest = node.values[:place] + node.values[place + 1 :]
            yield rest[0] if len(rest) == 1 else _with(node, values=rest)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    if getattr(node, "decides", False):
        yield ast.UnaryOp(ast.Not(), node)


@operator("constant")
def constant(node: Any) -> Iterator[ast.AST]:
    if not isinstance(node, ast.Constant):
        return
    value = node.value
    if isinstance(value, bool):
        yield ast.Constant(not value)
    elif isinstance(value, int):
        yield ast.Constant(value + 1)
        if value:
            yield ast.Constant(value - 1)
    elif isinstance(value, float) and value:
        yield ast.Constant(value * 2)


@operator("wait dropped")
def wait_dropped(node: Any) -> Iterator[ast.AST]:
    if isinstance(node, ast.Expr) and _method(node.value) in WAITS:
        yield ast.Pass()


@operator("copy dropped")
def copy_dropped(node: Any) -> Iterator[ast.AST]:
    if _method(node) in COPIES and _receiver(node):
        yield _receiver(node)  # type: ignore[misc]


@operator("dtype")
def dtype(node: Any) -> Iterator[ast.AST]:
    if isinstance(node, ast.Attribute) and node.attr in DTYPES:
        yield _with(node, attr=DTYPES[node.attr])
    receiver = _receiver(node) if isinstance(node, ast.Call) else None
    if receiver is None:
        return
    if _method(node) in ("float", "double"):
        yield receiver
        narrow = {"float": "bfloat16", "double": "float"}[_method(node)]
        yield _with(node, func=_with(node.func, attr=narrow))
    if _method(node) == "to" and len(node.args) == 1:
        yield receiver


@operator("arguments swapped")
def arguments_swapped(node: Any) -> Iterator[ast.AST]:
    if not isinstance(node, ast.Call) or any(
        isinstance(a, ast.Starred) for a in node.args
    ):
        return
    if _method(node) in ("isinstance", "getattr", "hasattr"):
        return
    for place in range(len(node.args) - 1):
        changed = [*node.args]
        changed[place], changed[place + 1] = changed[place + 1], changed[place]
        yield _with(node, args=changed)


@operator("reduction")
def reduction(node: Any) -> Iterator[ast.AST]:
    if isinstance(node, ast.Attribute) and node.attr in REDUCTIONS:
        yield _with(node, attr=REDUCTIONS[node.attr])
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        other = {"sum": "max"}.get(node.func.id) or REDUCTIONS.get(
            node.func.id
        )
        if other:
            yield _with(node, func=ast.Name(other, ast.Load()))
    if isinstance(node, ast.Constant) and node.value in REDUCTIONS:
        yield ast.Constant(REDUCTIONS[node.value])


@operator("slice")
def slice_bound(node: Any) -> Iterator[ast.AST]:
    if isinstance(node, ast.Slice):
        for name in ("lower", "upper"):
            bound = getattr(node, name)
            if bound is not None:
                yield _with(node, **{name: None})
                yield _with(
                    node,
                    **{name: ast.BinOp(bound, ast.Add(), ast.Constant(1))},
                )


@operator("statement dropped")
def statement_dropped(node: Any) -> Iterator[ast.AST]:
    calls = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    if calls and _method(node.value) not in WAITS:
        yield ast.Pass()
    if isinstance(node, ast.AugAssign):
        yield ast.Pass()


@operator("early return")
def early_return(node: Any) -> Iterator[ast.AST]:
    """The rest of a function that returns nothing is not run."""
    if getattr(node, "may_return", False):
        yield ast.Return(None)


@operator("not in place")
def not_in_place(node: Any) -> Iterator[ast.AST]:
    """The result is new. Of a temporary, which nothing else names, that changes nothing."""
    name = _method(node)
    named = isinstance(node, ast.Call) and _is_named(_receiver(node))
    if name.endswith("_") and not name.endswith("__") and named:
        yield _with(node, func=_with(node.func, attr=name[:-1]))
    if isinstance(node, ast.Call):
        kept = [keyword for keyword in node.keywords if keyword.arg != "out"]
        if len(kept) < len(node.keywords):
            yield _with(node, keywords=kept)


def _is_named(node: ast.expr | None) -> bool:
    """True of a variable, an attribute, an element, and a view of one that a method gives."""
    if isinstance(node, ast.Call):
        return _is_named(_receiver(node))
    return isinstance(node, ast.Name | ast.Attribute | ast.Subscript)


# ---- applied to a file


@dataclass(frozen=True)
class Mutation:
    """One mistake in one file. `start` and `end` are bytes of the source; `lines` are those of the
    statement that it is in. `number` tells equal changes in one function apart. A statement that runs
    at import has the names that it binds in `binds`."""

    path: str
    function: str
    operator: str
    old: str
    new: str
    number: int
    start: int
    end: int
    lines: range
    binds: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """An identity that stays when other lines of the file change."""
        what = f"{_one_line(self.old)} -> {_one_line(self.new)}"
        return f"{self.path} {self.function} [{self.operator}] {what} #{self.number}"

    def applied(self, source: bytes) -> bytes:
        """The source with the mistake. All other code keeps its line."""
        lost = self.old.count("\n") - self.new.count("\n")
        new = self.new
        if lost and new.endswith(")"):
            new = new[:-1] + "\n" * lost + ")"
        elif lost:
            new += "\n" * lost
        return source[: self.start] + new.encode() + source[self.end :]


def _one_line(text: str) -> str:
    return " ".join(text.split())


def mutations_of(path: str, source: bytes) -> list[Mutation]:
    """All mutations of a file, in its order."""
    tree = ast.parse(source)
    return [*_File(path, source, tree).mutations()]


@dataclass(frozen=True)
class _Place:
    """A node's function, the lines of its statement, and what that binds if it runs at import."""

    function: str
    lines: range
    binds: frozenset[str]
    at_import: bool

    def of(self, child: ast.AST) -> _Place:
        """The place of a node that is inside a node of this place."""
        place = self
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            name = (
                f"{self.function}.{child.name}"
                if self.function
                else child.name
            )
            place = replace(place, function=name)
        # Its defaults matter to all of it.
        if isinstance(child, ast.FunctionDef):
            whole = range(child.lineno, (child.end_lineno or 0) + 1)
            return replace(
                place, lines=whole, binds=frozenset(), at_import=False
            )
        if isinstance(child, ast.stmt):
            binds = _bound(child) if self.at_import else frozenset[str]()
            place = replace(place, lines=_header(child), binds=binds)
        return place


class _File:
    """A parsed file, with what operators need to know of a node's surroundings."""

    def __init__(self, path: str, source: bytes, tree: ast.Module) -> None:
        self.path, self.source, self.tree = path, source, tree
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.seen: Counter[tuple[str, ...]] = Counter()

    def mutations(self) -> Iterator[Mutation]:
        yield from self._inside(
            self.tree, _Place("", range(0), frozenset(), at_import=True)
        )

    def _inside(self, node: ast.AST, place: _Place) -> Iterator[Mutation]:
        """The mutations of a node's children, where these may have any."""
        bodies = [
            value for _, value in ast.iter_fields(node) if _is_body(value)
        ]
        for body in bodies:
            yield from self._orders(body, place)
        for child in _children(node):
            at = place.of(child)
            if isinstance(child, ast.stmt):
                child.may_return = _may_return(node, child)  # type: ignore[attr-defined]
            for kind, apply in OPERATORS.items():
                for new in apply(child):
                    yield from self._made(
                        kind, at, child, child, _written(child, new)
                    )
            yield from self._inside(child, at)

    def _orders(
        self, body: list[ast.stmt], place: _Place
    ) -> Iterator[Mutation]:
        """Two statements in the other order, where that may be seen."""
        for first, second in pairwise(body):
            if (
                _is_plain(first)
                and _is_plain(second)
                and _may_swap(first, second)
            ):
                between = self.source[
                    self._end(first) : self._start(second)
                ].decode()
                text = self._old(second) + between + self._old(first)
                lines = range(first.lineno, (second.end_lineno or 0) + 1)
                at = replace(place.of(first), lines=lines)
                yield from self._made("order", at, first, second, text)

    def _made(
        self, kind: str, place: _Place, first: ast.AST, last: ast.AST, new: str
    ) -> Iterator[Mutation]:
        start, end = self._start(first), self._end(last)
        old = self.source[start:end].decode()
        if _one_line(old) != _one_line(new):
            key = place.function, kind, _one_line(old), _one_line(new)
            self.seen[key] += 1
            yield Mutation(
                self.path, place.function, kind, old, new, self.seen[key], start, end,
                place.lines, place.binds,
            )  # fmt: skip

    def _old(self, node: ast.AST) -> str:
        return self.source[self._start(node) : self._end(node)].decode()

    def _start(self, node: Any) -> int:
        return self.starts[node.lineno - 1] + node.col_offset

    def _end(self, node: Any) -> int:
        return self.starts[node.end_lineno - 1] + node.end_col_offset


def _is_body(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and isinstance(value[0], ast.stmt)
    )


# What cannot change a result: the text that people read, and what only mypy reads.
_SKIPPED = (
    ast.Raise,
    ast.Assert,
    ast.JoinedStr,
    ast.Import,
    ast.ImportFrom,
    ast.Global,
)
_SKIPPED_FIELDS = {
    "annotation",
    "returns",
    "decorator_list",
    "bases",
    "type_params",
    "msg",
}
_SKIPPED_NAMES = {"__repr__", "__str__"}


def _children(node: ast.AST) -> Iterator[ast.AST]:
    for field, value in ast.iter_fields(node):
        if field in _SKIPPED_FIELDS:
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, _SKIPPED):
                continue
            if getattr(child, "name", "") in _SKIPPED_NAMES:
                continue
            if isinstance(child, ast.Expr) and _is_string(child.value):
                continue  # a docstring
            decides = field == "test" or (
                field == "ifs" and isinstance(node, ast.comprehension)
            )
            if decides and isinstance(
                child, ast.Name | ast.Attribute | ast.Call
            ):
                child.decides = True  # type: ignore[attr-defined]
            yield child


def _header(statement: ast.stmt) -> range:
    """The lines of a statement without the statements that are inside it."""
    bodies = [
        value for _, value in ast.iter_fields(statement) if _is_body(value)
    ]
    last = (statement.end_lineno or statement.lineno) + 1
    if bodies:
        last = max(statement.lineno + 1, bodies[0][0].lineno)
    return range(statement.lineno, last)


def _may_return(parent: ast.AST, child: ast.stmt) -> bool:
    """True of a statement in a function that returns nothing."""
    if not isinstance(parent, ast.FunctionDef) or not _is_plain(child):
        return False
    values = (
        node.value for node in ast.walk(parent) if isinstance(node, ast.Return)
    )
    yields = any(
        isinstance(node, ast.Yield | ast.YieldFrom)
        for node in ast.walk(parent)
    )
    return not yields and all(value is None for value in values)


def _is_plain(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Call)
    return isinstance(statement, ast.Assign | ast.AugAssign)


def _may_swap(first: ast.stmt, second: ast.stmt) -> bool:
    """True if both name a common thing, one of them calls something, and neither binds what the other
    reads: else nothing changes, or a name is missing."""
    calls = any(
        isinstance(node, ast.Call)
        for each in (first, second)
        for node in ast.walk(each)
    )
    common = (_named(first) & _named(second)) - {"self"}
    return calls and bool(common) and not _bound(first) & _named(second)


def _named(statement: ast.stmt) -> set[str]:
    """Names and attributes that a statement mentions."""
    parts = [
        node
        for node in ast.walk(statement)
        if isinstance(node, ast.Name | ast.Attribute)
    ]
    return {ast.unparse(part) for part in parts}


def _bound(statement: ast.stmt) -> frozenset[str]:
    parts = [
        node for node in ast.walk(statement) if isinstance(node, ast.Name)
    ]
    return frozenset(
        part.id for part in parts if isinstance(part.ctx, ast.Store)
    )


def _written(old: ast.AST, new: ast.AST) -> str:
    """The text of a new node; an expression stands in parentheses."""
    text = ast.unparse(ast.fix_missing_locations(copy.deepcopy(new)))
    simple = isinstance(new, ast.stmt | ast.Slice | ast.Constant)
    return text if simple else f"({text})"
