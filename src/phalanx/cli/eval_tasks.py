"""Adapter of a trained model to lm-eval's harness.

The harness provides tasks and metrics, the model log-probabilities and continuations.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .usage import UsageError

if TYPE_CHECKING:
    from ..generate import Generator
    from ..training.data.vocabulary import Vocabulary

LONGEST = 2048  # tokens of a prompt with its continuation, if the model sets no limit
Scores = dict[str, dict[str, Any]]  # by task and metric


class TaskError(ValueError):
    """Raised if a task's data cannot be loaded."""

    exit_code = 1


def task_scores(
    generator: Generator,
    vocabulary: Vocabulary,
    tasks: Sequence[str],
    *,
    limit: int | None = None,
    shots: int | None = None,
    longest: int = 0,
) -> Scores:
    """Return the scores of a model on lm-eval tasks."""
    # By name, as lm-eval is not a dependency.
    try:
        lm_eval: Any = importlib.import_module("lm_eval")
        base: Any = importlib.import_module("lm_eval.api.model").TemplateLM
        manager: Any = importlib.import_module("lm_eval.tasks").TaskManager()
    except ModuleNotFoundError as error:
        # A module that lm-eval itself lacks is another problem.
        if (error.name or "").partition(".")[0] != "lm_eval":
            raise
        raise UsageError(
            "--tasks needs lm-eval, which is not installed: pip install lm_eval"
        ) from None
    # Before the model runs: a mistyped name would otherwise end in a traceback
    # of the harness.
    if unknown := sorted({*tasks} - {*manager.all_tasks}):
        raise UsageError(
            f"lm-eval knows no task {unknown[0]!r}. `lm_eval --tasks list` prints all."
        )
    model = model_class(base)(generator, vocabulary, longest)
    terms = {"tasks": list(tasks), "limit": limit, "num_fewshot": shots}
    try:
        found = lm_eval.simple_evaluate(
            model=model, task_manager=manager, **terms
        )
    except OSError as error:  # from the hub or the network
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise TaskError(f"the data of {', '.join(tasks)}: {first}") from error
    return {name: _plain(scores) for name, scores in found["results"].items()}


def _plain(scores: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numeric scores of a task."""
    return {
        # "acc,none" -> "acc": the part after the comma names a filter.
        name.removesuffix(",none"): value
        for name, value in scores.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def task_rows(scores: Scores) -> list[tuple[str, str, str]]:
    """Return a row for each metric of each task."""
    return [
        (
            task,
            name,
            f"{value:.4f}" if isinstance(value, float) else f"{value:,}",
        )
        for task, numbers in scores.items()
        for name, value in numbers.items()
    ]


def model_class(base: Any) -> Any:
    """Return the class of a model for lm-eval, whose TemplateLM is `base`."""

    class HarnessModel(HarnessMethods, base):  # type: ignore[misc]
        """Generator with lm-eval's model interface."""

    return HarnessModel


class HarnessMethods:
    """Methods of a model that lm-eval calls, computed by a generator.

    A class of a model for lm-eval derives from these and from its TemplateLM, which
    tokenizes prompts and continuations.
    """

    prefix_token_id: int  # the base class has it

    def __init__(
        self,
        generator: Generator,
        vocabulary: Vocabulary,
        longest: int = 0,
    ) -> None:
        super().__init__()
        self.generator, self.vocabulary = generator, vocabulary
        # The user's length, the model's, or a common one.
        self.longest = longest or generator.longest or LONGEST

    @property
    def eot_token_id(self) -> int:
        """Token placed before a text without a prompt."""
        return 0 if self.vocabulary.end is None else self.vocabulary.end

    def tok_encode(
        self,
        string: str,
        add_special_tokens: bool | None = None,
        **more: Any,
    ) -> list[int]:
        return self.vocabulary.prompt(string)

    def _loglikelihood_tokens(
        self, requests: Any, **more: Any
    ) -> list[tuple[float, bool]]:
        # Each is ((prompt, continuation), tokens of the prompt, tokens of the
        # continuation).
        return [self._scored(prompt, rest) for _, prompt, rest in requests]

    def _scored(
        self, prompt: list[int], rest: list[int]
    ) -> tuple[float, bool]:
        """Return the log-probability of a continuation, and whether greedy decoding
        yields it."""
        # One token more than a window, as the last is only predicted. The
        # beginning is cut.
        tokens = (prompt + rest)[-(self.longest + 1) :]
        # At least one token must be left as a prompt.
        count = min(len(rest), len(tokens) - 1)
        chances = self.generator.log_probabilities(tokens, count)
        wanted = tokens[-count:]
        own = [row[token] for row, token in zip(chances, wanted, strict=True)]
        greedy = chances.argmax(-1).tolist() == wanted
        return float(sum(own)), greedy

    def loglikelihood_rolling(
        self, requests: Any, disable_tqdm: bool = False
    ) -> list[float]:
        utils: Any = importlib.import_module("lm_eval.utils")
        sums = []
        for (text,) in (request.args for request in requests):
            windows = utils.get_rolling_token_windows(
                # A text longer than a window is scored in windows, each
                # token once.
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.longest,
                context_len=1,
            )
            pairs = map(utils.make_disjoint_window, windows)
            sums.append(sum(self._scored(*pair)[0] for pair in pairs))
        return sums

    def generate_until(
        self, requests: Any, disable_tqdm: bool = False
    ) -> list[str]:
        return [self._continued(*request.args) for request in requests]

    def _continued(self, prompt: str, how: Mapping[str, Any]) -> str:
        """Return the continuation of a prompt, up to one of the task's stop
        strings."""
        from ..generate import Sampling
        from ..training.text import continued

        # At least one token of the prompt is kept.
        most = min(int(how.get("max_gen_toks", 256)), self.longest - 1)
        drawn = bool(how.get("do_sample", False))
        temperature = float(how.get("temperature", 1.0)) if drawn else 0.0
        # The end of the prompt is kept, with room for the answer.
        tokens = self.tok_encode(prompt)[-max(1, self.longest - most) :]
        until = how.get("until", [])
        ends = [until] if isinstance(until, str) else list(until)
        text = ""
        sampling = Sampling(temperature)
        for piece in continued(
            self.generator, self.vocabulary, tokens, most, sampling
        ):
            text += piece
            # A stop string may lie across two pieces, so the whole text is
            # searched.
            if any(end in text for end in ends):
                break
        # The earliest of all stop strings ends the text.
        at = [text.index(end) for end in ends if end in text]
        return text[: min(at)] if at else text
