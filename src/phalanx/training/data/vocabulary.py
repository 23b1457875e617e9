"""Tokenizes text with a tokenizer.json or as bytes, and chats with a chat template.

The tokens of answers are marked for training: every token that contains a character of
an answer. A template with {% generation %} marks its answers itself. Otherwise an
answer is what follows the prompt, as the template writes it with add_generation_prompt,
up to the end of the turn. A template that writes earlier turns differently when more
follow is refused.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from ..folder import Folder
from .rows import BadRow, Message, answers
from .sources import needed
from .token_files import AS_BYTES, DataError, dtype_for

LIMIT = 256 << 20  # bytes of a tokenizer.json
FILE, CONFIG, MODEL = "tokenizer.json", "tokenizer_config.json", "config.json"
TEMPLATE = "chat_template.jinja"
GENERATION = "generation_config.json"


class Encoded(NamedTuple):
    """The tokens of some documents in a row, and the length of each.

    `answers` is 1 for tokens that are trained on; None means all are.
    """

    tokens: NDArray[Any]
    lengths: NDArray[np.int64]
    answers: NDArray[np.uint8] | None = None


class Bytes:
    """A vocabulary in which every byte is a token. No token closes a document: masks
    keep them apart.

    Common to this and `Tokenizer`: `name` and `size` go into the index, `end` closes
    each document, and `marks` change if texts are tokenized differently. Texts are
    passed as joined UTF-8 bytes with the length of each.
    """

    name: str = AS_BYTES
    size: int = 256
    end: int | None = None
    marks: tuple[str, ...] = (AS_BYTES,)

    @property
    def ends(self) -> frozenset[int]:
        """The tokens that end generated text: none."""
        return frozenset()

    def encode(
        self, raw: bytes | memoryview, lengths: NDArray[np.int64]
    ) -> Encoded:
        return Encoded(np.frombuffer(raw, np.uint8), lengths)

    def prompt(self, text: str) -> list[int]:
        """Return the tokens of a text that a model is to continue."""
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode tokens to text. A token beyond the bytes, of a larger vocabulary,
        becomes U+FFFD."""
        # 0xff occurs in no UTF-8 text, so it decodes to the replacement
        # character.
        known = [
            bytes([token]) if token < self.size else b"\xff"
            for token in tokens
        ]
        return b"".join(known).decode(errors="replace")

    def refuse_chats(self) -> NoReturn:
        """Raise, as bytes have no chat template."""
        raise DataError(
            f"chats need a tokenizer with a chat template: --tokenizer FOLDER, with {FILE},"
            f" {CONFIG} and {TEMPLATE}."
        )

    def encode_chat(self, messages: list[Message], tools: Any) -> Encoded:
        self.refuse_chats()

    def encode_answer(self, prompt: str, answer: str) -> Encoded:
        """Tokenize a prompt and its answer; only the answer is trained on."""
        return _answered(self, prompt, answer)


class Tokenizer:
    """A `tokenizer.json`, alone or in its folder. The files are data and run nothing.

    In a folder the model's end-of-text token closes each document unless another is
    named. The folder may have a chat template, which transformers renders in its
    sandbox.
    """

    def __init__(self, path: Path, end: str | None) -> None:
        tokenizers = needed("tokenizers", path, f"to read a {FILE}")
        self.folder = path if path.is_dir() else None
        path = path / FILE if self.folder else path
        files = Folder(path.parent, DataError)
        text = files.text(path.name, LIMIT)
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # tokenizers raises plain Exception
            raise DataError(f"{path}: is not a {FILE}: {error}.") from None
        # Settings of inference, which would cut or lengthen texts.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        # Everything that decides how texts and chats become tokens.
        texts = [text]
        if self.folder:
            there = [
                name
                for name in (CONFIG, TEMPLATE)
                if (self.folder / name).is_file()
            ]
            texts += [files.text(name, LIMIT) for name in there]
        self.marks = tuple(
            hashlib.sha256(each.encode()).hexdigest() for each in texts
        )
        self.name = f"{FILE} sha256:{self.marks[0]}"
        # Ids may have gaps, so take the highest one instead of their number.
        self.size = (
            max(
                self._tokenizer.get_vocab(with_added_tokens=True).values(),
                default=0,
            )
            + 1
        )
        self.end: int | None = None
        if end is not None:
            self.end = self._tokenizer.token_to_id(end)
            if self.end is None:
                raise DataError(
                    f"{path}: has no token {end!r} to close a document with."
                )
        elif self.folder:
            self.end = self._end_of_folder(self.folder)

    def _end_of_folder(self, folder: Path) -> int:
        """Return the end-of-text token of a model's folder."""
        files, end = Folder(folder, DataError), None
        if (folder / MODEL).is_file():
            # The model's configuration first: it is what generation stops at.
            end = files.json(MODEL, LIMIT).get("eos_token_id")
        if end is None and (folder / CONFIG).is_file():
            text = files.text(CONFIG, LIMIT)
            try:  # not parsed as our own files are: model_max_length is often 10**30
                token = json.loads(text).get("eos_token")
            except (ValueError, RecursionError, AttributeError) as error:
                raise DataError(
                    f"{folder / CONFIG}: is not a JSON object: {error}."
                ) from None
            # transformers writes special tokens as text or as an object.
            token = token.get("content") if isinstance(token, dict) else token
            end = (
                self._tokenizer.token_to_id(token)
                if isinstance(token, str)
                else None
            )
        # further ones end a turn of a chat
        end = end[0] if isinstance(end, list) and end else end
        # `type`, because True would pass for 1.
        if type(end) is not int or not 0 <= end < self.size:
            raise DataError(
                f"{folder / MODEL}: 'eos_token_id' is not a token of {FILE}. Prepare the data with"
                f" another: phalanx data prepare --tokenizer {folder}/{FILE} --end TOKEN."
            )
        return end

    def encode(
        self, raw: bytes | memoryview, lengths: NDArray[np.int64]
    ) -> Encoded:
        # Bounds of each text in the joined bytes.
        edges = [0, *accumulate(lengths.tolist())]
        texts = [str(raw[a:b], "utf-8") for a, b in pairwise(edges)]
        # the fast form computes no offsets
        encoded = self._tokenizer.encode_batch_fast(
            texts, add_special_tokens=False
        )
        closing = () if self.end is None else (self.end,)
        numbers = [each.ids for each in encoded]
        # Tokens of all texts in a row, each closed by the end of text.
        flat = list(
            chain.from_iterable(chain(ids, closing) for ids in numbers)
        )
        counts = np.fromiter(map(len, numbers), np.int64, len(numbers)) + len(
            closing
        )
        return Encoded(np.array(flat, f"<{dtype_for(self.size)}"), counts)

    # ---- generation

    @cached_property
    def ends(self) -> frozenset[int]:
        """The tokens that end generated text, from the files of the tokenizer's
        folder."""
        found = set() if self.end is None else {self.end}
        # Models of chats list several ends, such as the end of a turn.
        for name in (MODEL, GENERATION):
            if self.folder is not None and (self.folder / name).is_file():
                value = (
                    Folder(self.folder, DataError)
                    .json(name, LIMIT)
                    .get("eos_token_id")
                )
                values = value if isinstance(value, list) else [value]
                found |= {token for token in values if isinstance(token, int)}
        return frozenset(found)

    def prompt(self, text: str) -> list[int]:
        """Return the tokens of a text that a model is to continue."""
        ids: list[int] = self._tokenizer.encode(
            text, add_special_tokens=False
        ).ids
        return ids

    def chat_prompt(self, messages: list[Message]) -> list[int]:
        """Return the tokens of a chat up to the start of the model's answer."""
        return self.prompt(
            self._written(messages, None, add_generation_prompt=True)
        )

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode tokens to text, without special tokens."""
        text: str = self._tokenizer.decode(
            list(tokens), skip_special_tokens=True
        )
        return text

    # ---- chats

    def encode_answer(self, prompt: str, answer: str) -> Encoded:
        """Tokenize a prompt, its answer and the end of text; the prompt is not trained
        on."""
        return _answered(self, prompt, answer)

    def encode_chat(self, messages: list[Message], tools: Any) -> Encoded:
        """Tokenize one chat with its template and mark its answers."""
        template = self._chat_template
        try:
            # A template with {% generation %} marks the answers itself.
            if re.search(r"\{%-?\s*generation", template.chat_template):
                return self._marked(messages, tools)
            text, spans = self._spans(messages, tools)
        except BadRow:
            raise
        except Exception as error:  # raised by Jinja or by the template itself
            what = (
                str(error).splitlines()[0]
                if str(error)
                else type(error).__name__
            )
            raise BadRow(f"its chat template refuses it: {what}") from None
        encoded = self._tokenizer.encode(text, add_special_tokens=False)
        # A token counts if it shares a character with an answer.
        marks = [
            any(a < stop and b > start for start, stop in spans)
            for a, b in encoded.offsets
        ]
        return self._of(encoded.ids, marks)

    def _of(self, ids: Sequence[int], marks: Sequence[object]) -> Encoded:
        tokens = np.array(ids, f"<{dtype_for(self.size)}")
        return Encoded(tokens, np.array([len(ids)]), np.array(marks, np.uint8))

    def refuse_chats(self) -> None:
        """Raise if chats cannot be tokenized."""
        _ = self._chat_template

    @cached_property
    def _chat_template(self) -> Any:
        """transformers' tokenizer of the folder, used for its template."""
        if self.folder is None:
            raise DataError(
                "chats need the tokenizer's folder, with its chat template, not a file."
            )
        transformers = needed(
            "transformers", self.folder, "to fill in a chat template"
        )
        needed("jinja2", self.folder, "to fill in a chat template")
        try:
            # From local files alone, and without code of the folder.
            made = transformers.PreTrainedTokenizerFast.from_pretrained(
                str(self.folder), local_files_only=True
            )
        except Exception as error:
            raise DataError(
                f"{self.folder}: transformers cannot read it: {error}."
            ) from None
        # A dict of templates leaves open which one to train with.
        if not isinstance(made.chat_template, str):
            what = (
                "several chat templates"
                if made.chat_template
                else "no chat template"
            )
            raise DataError(
                f"{self.folder}: has {what}. Put the one to train with there as {TEMPLATE}."
            )
        return made

    def _written(self, messages: list[Message], tools: Any, **how: Any) -> Any:
        made = self._chat_template
        return made.apply_chat_template(
            messages, tools=tools, **{"tokenize": False} | how
        )

    def _spans(
        self, messages: list[Message], tools: Any
    ) -> tuple[str, list[tuple[int, int]]]:
        """Render a chat as text, with the start and end of each answer."""
        # "weight" is ours and OpenAI's; templates do not know it.
        plain = [
            {k: x for k, x in message.items() if k != "weight"}
            for message in messages
        ]
        text, spans = self._written(plain, tools), list[tuple[int, int]]()
        for n, message in enumerate(messages):
            if not answers(n, message):
                continue
            prompt = self._written(
                plain[:n], tools, add_generation_prompt=True
            )
            upto = self._written(plain[: n + 1], tools)
            # An answer's span is valid only if longer chats begin with the
            # same text.
            if not (text.startswith(upto) and upto.startswith(prompt)):
                raise BadRow(
                    f"the chat template renders message {n} differently when it is the last one;"
                    " mark answers in it with {% generation %} and {% endgeneration %}"
                )
            # Characters between the prompt and the end of this turn.
            spans.append((len(prompt), len(upto)))
        return text, spans

    def _marked(self, messages: list[Message], tools: Any) -> Encoded:
        # The template's marks would ignore the weight.
        if any(message.get("weight", 1) == 0 for message in messages):
            raise BadRow(
                "one of its messages has weight 0, and the template marks all answers"
            )
        how = {
            "tokenize": True,
            "return_dict": True,
            "return_assistant_tokens_mask": True,
        }
        made = self._written(messages, tools, **how)
        return self._of(made["input_ids"], made["assistant_masks"])


Vocabulary = Bytes | Tokenizer


def _answered(vocabulary: Vocabulary, prompt: str, answer: str) -> Encoded:
    closing = [] if vocabulary.end is None else [vocabulary.end]
    asked, answered = (
        vocabulary.prompt(prompt),
        vocabulary.prompt(answer) + closing,
    )
    tokens = np.array(asked + answered, f"<{dtype_for(vocabulary.size)}")
    marks = np.array([0] * len(asked) + [1] * len(answered), np.uint8)
    return Encoded(tokens, np.array([len(tokens)]), marks)


def open_vocabulary(path: Path | None, end: str | None = None) -> Vocabulary:
    """Open the tokenizer of a file or folder; without a path, bytes are tokens."""
    if path is not None:
        return Tokenizer(path, end)
    if end is not None:
        raise DataError(
            "bytes have no token to close a document with; give a tokenizer or no end."
        )
    return Bytes()
