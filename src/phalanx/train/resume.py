"""The start of a run's steps: from a checkpoint, from a model's folder, or from weights that are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from ..layout.run import RunError, random_by_name
from ..parallel.model import is_lora
from .checkpoint_exchange import HubReader
from .checkpoint_format import RUN_ID, CheckpointError, Progress
from .checkpoint_load import Loaded, begin, changed_settings, data_notices, load
from .checkpoint_memory import MemoryCheckpoints
from .data.digests import SourceRecord, fingerprint, table_of
from .log import RunLog
from .rank import Rank
from .uploads import Uploads


class RunState:
    """The state of a run that a checkpoint has beside its tensors, and what is taken from one.

    `data` are the records of the run's sources; `uploads` knows the run's id.
    """

    def __init__(
        self, rank: Rank, data: Sequence[SourceRecord], uploads: Uploads
    ) -> None:
        self.rank, self.data, self.uploads = rank, list(data), uploads

    def progress(self, done: int) -> Progress:
        """The state after so many steps."""
        rank, scaling = self.rank, self.rank.part.trainer.scaling
        state = {"loss_scale": [scaling.scale, scaling.steady]} if scaling else {}
        config: dict[str, Any] = {
            "run": asdict(rank.run),
            "model": rank.identity.record,
        }
        config["data"] = table_of(self.data)
        config[RUN_ID] = self.uploads.run_id
        return Progress(
            done, rank.batches.cursor(done), rank.run.seed, fingerprint(self.data),
            str(rank.part.layout), rank.shape, config, state,
        )  # fmt: skip

    def restore(self, loaded: Loaded) -> None:
        """Continues the data behind what has been seen, and the loss scale; refuses another seed."""
        progress, rank = loaded.progress, self.rank
        if progress.seed != rank.run.seed:
            raise CheckpointError(
                f"{loaded.path} was begun with seed = {progress.seed}, the run says {rank.run.seed}."
                f" Write seed = {progress.seed}, or another `out`."
            )
        rank.batches = rank.batches.resumed(progress.step, progress.cursor)
        scaling, scale = rank.part.trainer.scaling, progress.state.get("loss_scale")
        if scaling and scale is not None:
            # the manifest's reader has checked both
            scaling.scale, scaling.steady = scale


def load_or_draw(state: RunState, log: RunLog, memory: MemoryCheckpoints | None) -> int:
    """The step to go on with: that of the newest sound checkpoint, whose weights are read; or 0, with the
    weights of a model's folder or those of the seed. Every rank calls it."""
    rank, uploads, kept = state.rank, state.uploads, state.rank.run.checkpoint
    loaded = load(
        rank.run.checkpoints,
        rank.part.local,
        rank.part.updates,
        identity=rank.identity,
        optimizer=rank.run.optimizer.name,
        adopt=kept.adopt,
        remote=uploads.remote,
        memory=memory,
    )
    if loaded is None:
        _draw(rank, log)
        return 0
    uploads.resumed(loaded)
    batches = rank.batches
    state.restore(loaded)
    progress = loaded.progress
    settings = changed_settings(progress, rank.run, rank.part.layout, rank.shape)
    notices = {"damaged": loaded.damaged, "model": loaded.notices, "settings": settings}
    if rank.world.rank == 0:  # which alone may have to read some of the data
        notices["data"] = data_notices(progress, loaded.path, state.data, batches)
    for event, texts in notices.items():
        for text in texts:
            log.event(event, text)
    at = f"step {progress.step} from {loaded.path} ({progress.layout})"
    log.event("resume", f"resuming at {at}")
    return progress.step


def _draw(rank: Rank, log: RunLog) -> None:
    """The weights before the first step: those of a model's folder, with adapters drawn; or all drawn."""
    run, local = rank.run, rank.part.local
    if hub := run.hub:
        local.draw(run.seed, is_lora)
        begin(partial(HubReader, Path(hub)), local, rank.part.updates)
        log.event("model", f"the weights are those of {hub}")
        return
    if mistake := random_by_name(run):
        raise RunError("run", [mistake])
    local.draw(run.seed)
