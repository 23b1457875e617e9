"""Interprets the rows of a block: texts, or chats with answers to train on.

Nothing is guessed or repaired: a row that is neither text nor chat is reported with its
place and the reason. Empty rows (NULL, no text, no messages) and chats without an
answer are counted.
"""

import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .sources import BadFile, Source, SourceBlock, Table, blocks
from .token_files import DataError

TEXT, MESSAGES, SHAREGPT, PAIR = (
    "text",
    "messages",
    "conversations",
    ("prompt", "completion"),
)
ALPACA = ("instruction", "input", "output")
PREFERENCE = ("prompt", "chosen", "rejected")
ASSISTANT = "assistant"
_CALLED = {  # names of roles in ShareGPT files
    "user": ("human", "user"),
    ASSISTANT: ("gpt", "assistant", "model", "chatgpt", "bing", "bard"),
    "system": ("system",),
    "tool": ("tool", "function", "observation"),
}
_ROLES = {name: role for role, names in _CALLED.items() for name in names}

Message = dict[str, Any]


class Answered(NamedTuple):
    """Prompt and answer as plain text, without a chat template."""

    prompt: str
    answer: str


# Messages with their tools, or plain text.
Chat = tuple[list[Message], Any] | Answered


@dataclass(frozen=True)
class Form:
    """The form of a row: text in the column `field`, or a chat.

    A chat without a field has the columns `names`: a prompt with its completion, an
    instruction with its output, or a preference pair. `plain` answers need no chat
    template.
    """

    field: str
    chat: bool
    names: tuple[str, ...] = PAIR
    plain: bool = False

    @property
    def pairs(self) -> bool:
        """True if each row consists of two documents, a chosen and a rejected
        answer."""
        return not self.field and self.names == PREFERENCE

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns to read from a table."""
        return (
            *([self.field] if self.field else self.names),
            *(["tools"] if self.chat else []),
        )

    def __str__(self) -> str:
        what = self.field or " and ".join(self.names)
        if self.pairs:
            return f"pairs of answers ({what}), of which the chosen one is preferred"
        return (
            f"chats ({what}), of which answers are trained on"
            if self.chat
            else f"text ({what})"
        )


@dataclass
class Rows:
    """The documents of a block with their numbers in the file.

    Texts are joined in UTF-8, with the length of each; chats are lists of messages.
    `faults` are places with reasons.
    """

    numbers: list[int] = field(default_factory=list)
    raw: bytes | memoryview = b""
    lengths: NDArray[np.int64] = field(
        default_factory=lambda: np.empty(0, np.int64)
    )
    # messages and tools of each; of a pair, the chosen answer and then the rejected one
    chats: list[Chat] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    empty: int = 0
    unanswered: int = 0


class BadRow(ValueError):
    """Raised for a row that is not valid text or a valid chat."""


def form_of(sources: Sequence[Source], name: str) -> Form:
    """Detect the form of the sources' rows from the first non-empty one. `name` is the
    field, if given."""
    why = ""
    for source in sources:
        if source.kind == "text":
            continue
        try:
            # The first row that tells its form decides for all sources.
            for block in blocks(source):
                for _, row in _objects(block, []):
                    try:
                        if form := _form(row, name, str(source.path)):
                            return form
                    except BadRow as error:
                        why = why or str(error)
                # A block of faulty rows is enough to report the first of them.
                if why:
                    break
        except BadFile as error:
            why = why or str(error)
    # Plain text has no rows, so beside it a fault does not decide.
    if why and all(source.kind != "text" for source in sources):
        raise DataError(f"{why}.")
    return Form(name or TEXT, False)


def _form(row: Any, name: str, where: str) -> Form | None:
    """Return the form of a row, or None if it is empty."""
    if not isinstance(row, dict):
        return None
    if name and name not in row:
        raise BadRow(
            f"{where}: has no {name!r}; it has {_names(row)}. Use --field"
        )
    # The named column decides: a text, or a chat as a list of messages.
    if name:
        return (
            Form(name, not isinstance(row[name], str)) if row[name] else None
        )
    known = [each for each in (TEXT, MESSAGES, SHAREGPT) if each in row]
    # Empty columns do not count: files often have unused ones.
    there = [each for each in known if row[each]]
    if len(there) > 1:
        raise DataError(
            f"{where}: has {' and '.join(there)}. Choose one with --field."
        )
    if there:
        return Form(there[0], there[0] != TEXT)
    # Other rows may have a pair of columns that belong together.
    if all(each in row for each in PAIR):
        return Form("", True)
    # Chosen and rejected as texts need no chat template.
    if "chosen" in row and "rejected" in row:
        return Form("", True, PREFERENCE, isinstance(row["chosen"], str))
    if "instruction" in row and "output" in row:
        return Form("", True, ALPACA)
    if known:
        return None
    raise BadRow(
        f"{where}: has {_names(row)}, and no text, messages, conversations, prompt with"
        " completion, instruction with output, or chosen with rejected. Name the field: --field NAME"
    )


def read_rows(block: SourceBlock, form: Form) -> Rows:
    """Return the documents of a block."""
    rows = Rows()
    if block.source.kind == "text":
        _plain_text(block, form, rows)
        return rows
    # Plain columns of text are read as a whole, without an object for each
    # row.
    if not form.chat and _column(block, form, rows):
        return rows
    texts = list[bytes]()
    for number, row in _objects(block, rows.faults):
        try:
            if form.chat:
                _add_chat(row, number, form, rows)
                continue
            text = _named(row, form.field)
            if text is not None and not isinstance(text, str):
                raise BadRow(f"{form.field!r} is not text")
            if text:
                texts.append(_utf8(text))
                rows.numbers.append(number)
            else:
                rows.empty += 1
        except BadRow as error:
            rows.faults.append(f"{place(block, number)}: {error}")
    rows.raw, rows.lengths = (
        b"".join(texts),
        np.array([*map(len, texts)], np.int64),
    )
    return rows


def place(block: SourceBlock, number: int) -> str:
    kind = block.source.kind
    lines = kind == "lines" or (
        kind == "array" and isinstance(block.content, bytes)
    )
    what = "line" if lines else "element" if kind == "array" else "row"
    return f"{block.source.path}, {what} {number}"


def _utf8(text: str, where: str = "") -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise BadRow(
            f"{where}character {error.start} is half of a surrogate pair"
        ) from None


def _plain_text(block: SourceBlock, form: Form, rows: Rows) -> None:
    content, path = block.content, block.source.path
    assert isinstance(content, bytes)
    if form.chat:
        if not block.first:
            rows.faults.append(
                f"{path}: is plain text, and the others are chats"
            )
        return
    try:
        # Only checked: the bytes are kept as they are.
        content.decode()
    except UnicodeDecodeError as error:
        at = f"byte {error.start} of document {block.first} (0x{content[error.start]:02x})"
        rows.faults.append(f"{path}: {at} is not UTF-8")
        return
    if content:
        rows.numbers.append(block.first)
        rows.raw, rows.lengths = content, np.array([len(content)])
    else:
        rows.empty += 1


# ---- rows as columns


def _column(block: SourceBlock, form: Form, rows: Rows) -> bool:
    """Read a block's texts as a whole through Arrow, without a Python object for each.

    Returns False for anything unusual; the block is then read row by row, which reports
    the fault.
    """
    content = block.content
    # JSON lines that are regular enough become a table as well.
    table = (
        content.batch
        if isinstance(content, Table)
        else _lines_as_table(block, form)
    )
    if table is None:
        return False
    pyarrow = importlib.import_module("pyarrow")
    # NULL, numbers and nested columns have another type.
    if table.schema.field(form.field).type not in (
        pyarrow.string(),
        pyarrow.large_string(),
    ):
        return False
    column = table.column(form.field).cast(pyarrow.large_string())
    if isinstance(content, Table):
        try:
            # validates UTF-8; JSON lines were decoded before
            column.validate(full=True)
        except pyarrow.ArrowInvalid:
            return False
    elif column.num_chunks != 1:
        return False
    else:
        column = column.chunk(0)
    # Numbers of the rows in the file, from which empty ones are taken away.
    numbers = np.arange(block.first, block.first + len(column))
    if column.null_count:
        numbers = numbers[column.is_valid().to_numpy(zero_copy_only=False)]
        column = column.drop_null()
    # Arrow's layout of text: an offset for each row, and all bytes together.
    _, offsets, data = column.buffers()
    # A slice shares the buffer of its table and begins at `column.offset`.
    edges = np.frombuffer(offsets, np.int64)[column.offset :][
        : len(column) + 1
    ]
    lengths = np.diff(edges)
    rows.empty = table.num_rows - int((lengths > 0).sum())
    rows.numbers = numbers[lengths > 0].tolist()
    # Without a copy: the texts are adjacent in the buffer.
    rows.raw = memoryview(data)[edges[0] : edges[-1]] if data else b""
    rows.lengths = lengths[lengths > 0]
    return True


def _lines_as_table(block: SourceBlock, form: Form) -> Any:
    """Parse JSON lines into an Arrow table, or return None if pyarrow is missing or the
    lines are unusual."""
    if not isinstance(block.content, bytes):
        return None
    try:
        reader, pyarrow = map(
            importlib.import_module, ("pyarrow.json", "pyarrow")
        )
        # refuses invalid UTF-8 in the other fields too
        _ = block.content.isascii() or block.content.decode()
    except (ImportError, UnicodeDecodeError):
        return None
    # The field's type is given, so that a number in it is a fault, not a text.
    schema = pyarrow.schema([(form.field, pyarrow.large_string())])
    try:
        # One block for all content, since the column has to be one chunk.
        table = reader.read_json(
            pyarrow.BufferReader(block.content),
            reader.ReadOptions(
                use_threads=False, block_size=len(block.content) + 1
            ),
            reader.ParseOptions(
                explicit_schema=schema, unexpected_field_behavior="ignore"
            ),
        )
    except pyarrow.ArrowException:
        return None
    # Arrow reads a missing field as NULL, and two objects on one line as two rows:
    # leave both to Python.
    whole = table.num_rows == block.lines and not table.column(0).null_count
    return table if whole else None


# ---- rows as Python objects


def _objects(
    block: SourceBlock, faults: list[str]
) -> Iterator[tuple[int, Any]]:
    """Yield numbered rows; unreadable ones are added to `faults`."""
    # Blocks of JSON arrays were decoded when they were cut.
    if isinstance(block.content, list):
        yield from enumerate(block.content, block.first)
        return
    if isinstance(block.content, Table):
        table = block.content.batch
        for number in range(block.first, block.first + table.num_rows):
            try:
                yield (
                    number,
                    table.slice(number - block.first, 1).to_pylist()[0],
                )
            except (
                UnicodeDecodeError
            ) as error:  # Arrow does not validate UTF-8
                faults.append(
                    f"{place(block, number)}: byte {error.start} of a text is not UTF-8"
                )
        return
    assert isinstance(block.content, bytes)
    lines: Any
    try:
        lines = block.content.decode().split("\n")
    except UnicodeDecodeError:  # the loop below finds the invalid line
        lines = block.content.split(b"\n")
    # Decoded line by line if the whole block is not valid.
    for number, line in enumerate(lines, block.first):
        try:
            text = line if isinstance(line, str) else line.decode()
            # A blank line is no row.
            if text.strip(" \t\r\v\f"):
                yield number, json.loads(text)
        except (ValueError, RecursionError) as error:
            what = str(error)
            if isinstance(error, UnicodeDecodeError):
                what = f"byte {error.start} is not UTF-8"
            faults.append(f"{place(block, number)}: is not JSON: {what}")


def _names(row: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, list(row)[:8])) or "no keys"


def _named(row: Any, name: str) -> Any:
    if not isinstance(row, dict):
        raise BadRow(f"is not an object with {name!r}")
    if name not in row:
        raise BadRow(f"has no {name!r}; it has {_names(row)}. Use --field")
    return row[name]


# ---- chats


def _add_chat(row: Any, number: int, form: Form, rows: Rows) -> None:
    if form.pairs:
        _add_pair(row, number, form, rows)
        return
    if form.field:
        messages = _messages(_named(row, form.field))
    elif form.names == ALPACA:
        messages = _instruction(row)
    else:  # a prompt and its completion, each a text or messages
        prompt, completion = (_named(row, each) for each in PAIR)
        messages = _turn(prompt, "user", PAIR[0]) + _turn(
            completion, ASSISTANT, PAIR[1]
        )
    if not messages:
        rows.empty += 1
    elif not _is_answered(messages):
        rows.unanswered += 1
    else:
        rows.numbers.append(number)
        rows.chats.append((messages, row.get("tools") or None))


def _instruction(row: Any) -> list[Message]:
    """Return the messages of an instruction with its optional input, and its output."""
    # `input` may be missing or empty: it then adds nothing to the instruction.
    instruction, output = (
        _named(row, each) for each in ("instruction", "output")
    )
    about = row.get("input")
    for value in (instruction, output, about):
        if value is not None and not isinstance(value, str):
            raise BadRow("its instruction, input and output are not all text")
    asked = "\n\n".join(part for part in (instruction, about) if part)
    return _turn(asked, "user", "instruction") + _turn(
        output, ASSISTANT, "output"
    )


def _add_pair(row: Any, number: int, form: Form, rows: Rows) -> None:
    """Add the chosen and the rejected answer to one prompt, each with the prompt as one
    document."""
    both = [_named(row, name) for name in ("chosen", "rejected")]
    prompt = row.get("prompt")
    # Without any answer the row is empty; with one it lacks the other.
    if not any(both):
        rows.empty += 1
        return
    made: list[Chat]
    if form.plain:
        for value in (*both, prompt):
            if value is not None and not isinstance(value, str):
                raise BadRow(
                    "its prompt, chosen and rejected are not all text"
                )
        if not all(both):
            rows.unanswered += 1
            return
        made = [Answered(prompt or "", answer) for answer in both]
    else:
        chats = _pair_of_chats(prompt, both)
        if not all(_is_answered(messages) for messages in chats):
            rows.unanswered += 1
            return
        made = [(messages, row.get("tools") or None) for messages in chats]
    # Both documents carry the number of their row.
    rows.numbers += [number, number]
    rows.chats += made


def _pair_of_chats(prompt: Any, both: list[Any]) -> list[list[Message]]:
    """Return two chats with the same prompt: the given one, or the messages that both
    chats begin with."""
    asked = _turn(prompt, "user", "prompt")
    chats = [_messages(value) for value in both]
    # Without a prompt, both chats repeat it: their common beginning is the
    # prompt.
    if not asked:
        shared = 0
        for one, other in zip(*chats, strict=False):
            if one != other:
                break
            shared += 1
        # Weight 0 keeps assistant messages of the prompt out of training.
        asked = [message | {"weight": 0} for message in chats[0][:shared]]
        chats = [messages[shared:] for messages in chats]
    return [asked + messages for messages in chats]


def _is_answered(messages: list[Message]) -> bool:
    return any(answers(n, message) for n, message in enumerate(messages))


def answers(number: int, message: Message) -> bool:
    """True if a message is an answer to train on. OpenAI's format excludes those with
    weight 0."""
    # A call of a tool is an answer without content.
    described = any(
        message.get(each)
        for each in ("content", "tool_calls", "reasoning_content")
    )
    own = message["role"] == ASSISTANT and message.get("weight", 1) != 0
    # A chat's first message has no prompt to answer.
    return number > 0 and own and bool(described)


def _turn(value: Any, role: str, name: str) -> list[Message]:
    if value is None or value == "":
        return []
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    messages = _messages(value)
    if (
        role != ASSISTANT
    ):  # assistant messages quoted in the prompt are not trained on
        return [message | {"weight": 0} for message in messages]
    if any(message["role"] != ASSISTANT for message in messages):
        raise BadRow(f"{name!r} has messages that are not the assistant's")
    return messages


def _messages(value: Any) -> list[Message]:
    """Return messages with `role` and `content`; ShareGPT's `from` and `value` are
    converted."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise BadRow("its messages are no list")
    return [_message(number, message) for number, message in enumerate(value)]


def _message(number: int, message: Any) -> Message:
    if not isinstance(message, dict):
        raise BadRow(f"message {number} is not an object")
    # Some writers store absent keys as null.
    plain = {name: x for name, x in message.items() if x is not None}
    # ShareGPT: `from` and `value`.
    if "role" not in plain and "from" in plain:
        role = _ROLES.get(str(plain.pop("from")).lower())
        if role is None:
            raise BadRow(
                f"message {number} is from {message['from']!r}, which is an unknown role"
            )
        plain = {"role": role, "content": plain.pop("value", ""), **plain}
    if not isinstance(plain.get("role"), str):
        raise BadRow(f"message {number} has no role; it has {_names(message)}")
    if not isinstance(plain.get("content", ""), str):
        raise BadRow(f"the content of message {number} is not text")
    # Half of a surrogate pair is valid in JSON, and not in UTF-8.
    for value in plain.values():
        if isinstance(value, str):
            _utf8(value, f"message {number}: ")
    return plain
