"""`phalanx chat`: a conversation with a model that was trained on chats.

  phalanx chat runs/chats
  phalanx chat runs/chats --system "Answer in one sentence." --temperature 0
  phalanx chat hf:Llama-3.2-1B-Instruct

SOURCE is a run, one of its checkpoints, or hf:FOLDER. Its tokenizer needs a chat template. Each line of
standard input is a message; Ctrl-C ends an answer, Ctrl-D the conversation.
"""

import sys

from .parser import Parser
from .sampling import add_sampling, add_source, sampling_of, source_of
from .usage import UsageError, say

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
    from ..train.data.vocabulary import Bytes
    from ..train.text import continued, open_generator, vocabulary_of

    vocabulary = vocabulary_of(source, args.tokenizer)
    # Bytes have no template to mark who speaks.
    if isinstance(vocabulary, Bytes):
        raise UsageError(
            "a chat needs a tokenizer with a chat template: --tokenizer FOLDER. Without one, use"
            " phalanx sample."
        )
    vocabulary.refuse_chats()
    generator = open_generator(source, own=args.model)
    messages = (
        [{"role": "system", "content": args.system}] if args.system else []
    )
    # No prompt is shown if the messages come from a file or a pipe.
    asks = sys.stdin.isatty()
    while True:
        if asks:
            say(_PROMPT, end="", flush=True)
        line = sys.stdin.readline()
        # An empty text is the end of the input; an empty line has a newline.
        if not line:
            break
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line.strip()})
        # The whole conversation each time, as a template may write earlier
        # messages in another way.
        prompt = vocabulary.chat_prompt(messages)
        answer = ""
        sampling = sampling_of(args, len(messages))
        pieces = continued(
            generator, vocabulary, prompt, args.tokens, sampling
        )
        try:
            for piece in pieces:
                say(piece, end="", flush=True)
                answer += piece
        except KeyboardInterrupt:
            if not asks:  # nobody who could go on
                raise
        say()
        messages.append({"role": "assistant", "content": answer})
    # Ends the line on which Ctrl-D was pressed.
    if asks:
        say()
    return 0
