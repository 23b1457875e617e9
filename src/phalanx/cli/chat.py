"""`phalanx chat`: a conversation with a model that was trained on chats.

  phalanx chat runs/chats
  phalanx chat runs/chats --system "Answer in one sentence." --temperature 0
  phalanx chat hf:Llama-3.2-1B-Instruct
  phalanx chat runs/large --layout "tp2 pp2"

SOURCE is a run, one of its checkpoints, or hf:FOLDER. Its tokenizer needs a chat template. Each line of
standard input is a message; Ctrl-C ends an answer, Ctrl-D the conversation. With --layout the model is
shared by processes of this machine, over tp and pp. With learned positions, the oldest messages are
dropped once the conversation exceeds the number of positions.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from .parser import Parser
from .sampling import (
    add_sampling,
    add_source,
    generator_of,
    layout_of,
    sampling_of,
    source_of,
)
from .usage import UsageError, say

if TYPE_CHECKING:
    from ..generate import Generator
    from ..training.data.vocabulary import Tokenizer

_PROMPT = "> "


def run(argv: list[str]) -> int:
    parser = Parser(__doc__, json=False)
    add_source(parser)
    parser.add(
        "--system",
        default="",
        metavar="TEXT",
        help="system message at the start of the conversation",
    )
    add_sampling(parser, tokens=512)
    args = parser.read(argv)
    source = source_of(args.source)
    layout = layout_of(args, source)
    from ..training.data.vocabulary import Bytes
    from ..training.text import vocabulary_of

    vocabulary = vocabulary_of(source, args.tokenizer)
    # Bytes have no template to mark who speaks.
    if isinstance(vocabulary, Bytes):
        raise UsageError(
            "a chat needs a tokenizer with a chat template: --tokenizer FOLDER. Without one, use"
            " phalanx sample."
        )
    vocabulary.refuse_chats()
    with generator_of(args, source, layout) as generator:
        _converse(args, generator, vocabulary)
    return 0


def _converse(
    args: argparse.Namespace, generator: Generator, vocabulary: Tokenizer
) -> None:
    """Answer the messages of standard input until it ends."""
    from ..generate import GenerateError

    conversation = Conversation(vocabulary, generator.longest, args.tokens)
    if args.system:
        conversation.add("system", args.system)
    # No prompt is shown if the messages come from a file or a pipe.
    asks = sys.stdin.isatty()
    while True:
        if asks:
            say(_PROMPT, end="", flush=True)
        line = sys.stdin.readline()
        # An empty text is the end of the input; an empty line has a newline.
        if not line:
            break
        if line.strip():
            conversation.add("user", line.strip())
            try:
                answer = _answer(args, generator, conversation, asks=asks)
            # A message may be longer than the model's positions.
            except GenerateError as error:
                if not asks:  # nobody who could write another
                    raise
                print(error, file=sys.stderr)
                conversation.take_back()
            else:
                conversation.add("assistant", answer)
    # Ends the line on which Ctrl-D was pressed.
    if asks:
        say()


def _answer(
    args: argparse.Namespace,
    generator: Generator,
    conversation: Conversation,
    *,
    asks: bool,
) -> str:
    """Write the answer to the last message piece by piece, and return it."""
    from ..training.text import continued

    prompt, count = conversation.prompt()
    sampling = sampling_of(args, conversation.added)
    answer = ""
    try:
        for piece in continued(
            generator, conversation.vocabulary, prompt, count, sampling
        ):
            say(piece, end="", flush=True)
            answer += piece
    except KeyboardInterrupt:
        if not asks:  # nobody who could go on
            raise
    say()
    return answer


class Conversation:
    """The messages so far, without the oldest if they exceed the model's positions."""

    def __init__(
        self, vocabulary: Tokenizer, longest: int | None, tokens: int
    ) -> None:
        self.vocabulary, self.longest = vocabulary, longest
        self.tokens = tokens  # maximum length of an answer
        self.messages: list[dict[str, str]] = []
        self.added = 0  # messages, with those that were dropped
        self.forgot = False

    def add(self, role: str, content: str) -> None:
        self.added += 1
        self.messages.append({"role": role, "content": content})

    def take_back(self) -> None:
        """Drop the last message, which has no answer."""
        self.messages.pop()

    def prompt(self) -> tuple[list[int], int]:
        """The tokens of the conversation, and how many an answer may have."""
        from ..generate import GenerateError

        # The whole conversation each time, as a template may write earlier
        # messages in another way.
        prompt = self.vocabulary.chat_prompt(self.messages)
        if self.longest is None:
            return prompt, self.tokens
        # Long answers would leave no room for the question.
        room = min(self.tokens, self.longest // 2)
        while len(prompt) + room > self.longest and self._forget_oldest():
            prompt = self.vocabulary.chat_prompt(self.messages)
        left = self.longest - len(prompt)
        if left < 1:
            raise GenerateError(
                f"the message makes a prompt of {len(prompt)} tokens, and the model has"
                f" {self.longest} positions. Write a shorter message."
            )
        return prompt, min(self.tokens, left)

    def _forget_oldest(self) -> bool:
        """Drop the oldest message and its answer; False if none can be dropped."""
        first = 1 if self.messages[0]["role"] == "system" else 0
        # The message that is to be answered stays.
        if len(self.messages) < first + 3:
            return False
        del self.messages[first : first + 2]
        if not self.forgot:
            self.forgot = True
            print(
                f"(the model has {self.longest} positions: it forgets the oldest messages)",
                file=sys.stderr,
            )
        return True
