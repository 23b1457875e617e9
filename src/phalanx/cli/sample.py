"""`phalanx sample`: text that a trained model writes after a prompt.

  phalanx sample runs/first --prompt "def main("
  phalanx sample runs/first --prompt "def " --tokens 300 --temperature 0.8 --top-k 50
  phalanx sample runs/first --prompt "import " --samples 3 --seed 7 --json
  phalanx sample hf:Llama-3.2-1B --prompt "The sea" --temperature 0
  phalanx sample runs/large --prompt "The sea" --layout "tp2 pp2"

SOURCE is a run, one of its checkpoints, written in any layout, or hf:FOLDER. The model is read into the
memory of this process, in float32. With --layout it is shared by processes of this machine, over tp and pp.
"""

from .parser import Parser, whole
from .sampling import (
    add_sampling,
    add_source,
    generator_of,
    layout_of,
    sampling_of,
    source_of,
)
from .usage import print_json, say


def run(argv: list[str]) -> int:
    parser = Parser(__doc__)
    add_source(parser)
    parser.add(
        "--prompt",
        default="\n",
        metavar="TEXT",
        help="the beginning of the text",
    )
    parser.add(
        "--samples",
        type=whole(1, 1024),
        default=1,
        help="number of texts to write",
    )
    add_sampling(parser, tokens=200)
    args = parser.read(argv)
    source = source_of(args.source)
    layout = layout_of(args, source)
    # Loaded after the options are checked: torch takes seconds.
    from ..training.text import continued, vocabulary_of

    vocabulary = vocabulary_of(source, args.tokenizer)
    prompt = vocabulary.prompt(args.prompt)
    texts: list[str] = []
    with generator_of(args, source, layout) as generator:
        for number in range(args.samples):
            # The prompt is read again for each text; only the seed differs.
            sampling = sampling_of(args, number)
            pieces = continued(
                generator, vocabulary, prompt, args.tokens, sampling
            )
            # JSON is written once, with all texts in it.
            if args.json:
                texts.append("".join(pieces))
                continue
            if number:
                say("---")
            say(args.prompt, end="")
            # Piece by piece, as the model writes.
            for piece in pieces:
                say(piece, end="", flush=True)
            say()
    if args.json:
        print_json({"source": source, "prompt": args.prompt, "texts": texts})
    return 0
