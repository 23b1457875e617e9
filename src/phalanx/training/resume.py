"""The starting point of a run: a checkpoint, a model's folder, or randomly drawn
weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from ..layout.adapters import adapts
from ..layout.run import RunError, random_by_name
from .checkpoint_exchange import HubReader
from .checkpoint_format import RUN_ID, CheckpointError, Progress
from .checkpoint_load import (
    Loaded,
    begin,
    changed_settings,
    data_notices,
    load,
)
from .checkpoint_memory import MemoryCheckpoints
from .data.digests import SourceRecord, fingerprint, table_of
from .log import RunLog
from .rank import Rank
from .uploads import Uploads


class RunState:
    """The state of a run that its checkpoints store beside the tensors.

    `data` are the records of the run's sources; `uploads` knows the run's id.
    """

    def __init__(
        self, rank: Rank, data: Sequence[SourceRecord], uploads: Uploads
    ) -> None:
        self.rank, self.data, self.uploads = rank, list(data), uploads

    def progress(self, done: int) -> Progress:
        """Return the state after `done` steps."""
        rank, scaling = self.rank, self.rank.part.trainer.scaling
        state = (
            # The scale and the steps since it changed, as a manifest checks
            # them.
            {"loss_scale": [scaling.scale, scaling.steady]} if scaling else {}
        )
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
        """Restore the data position and the loss scale; raise if the seed differs."""
        progress, rank = loaded.progress, self.rank
        if progress.seed != rank.run.seed:
            raise CheckpointError(
                f"{loaded.path} was begun with seed = {progress.seed}, but the run has {rank.run.seed}."
                f" Write seed = {progress.seed}, or another `out`."
            )
        # Other batch sizes continue after the same number of sequences.
        rank.batches = rank.batches.resumed(progress.step, progress.cursor)
        scaling, scale = (
            rank.part.trainer.scaling,
            progress.state.get("loss_scale"),
        )
        if scaling and scale is not None:
            # validated when the manifest was read
            scaling.scale, scaling.steady = scale


def load_or_draw(
    state: RunState, log: RunLog, memory: MemoryCheckpoints | None
) -> int:
    """Load the newest intact checkpoint, or draw the weights; return the step to start
    with. Collective.

    Without a checkpoint the weights come from a model's folder or from the seed, and
    the step is 0.
    """
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
    # A new run: weights are drawn, and it begins at step 0.
    if loaded is None:
        _draw(rank, log)
        return 0
    uploads.resumed(loaded)
    batches = rank.batches
    state.restore(loaded)
    # Settings that change numbers are told, not refused.
    progress = loaded.progress
    settings = changed_settings(
        progress, rank.run, rank.part.layout, rank.shape
    )
    notices = {
        "damaged": loaded.damaged,
        "model": loaded.notices,
        "settings": settings,
    }
    # Only rank 0, as it may have to read some of the data.
    if rank.world.rank == 0:
        notices["data"] = data_notices(
            progress, loaded.path, state.data, batches
        )
    for event, texts in notices.items():
        for text in texts:
            log.event(event, text)
    at = f"step {progress.step} from {loaded.path} ({progress.layout})"
    log.event("resume", f"resuming at {at}")
    return progress.step


def _draw(rank: Rank, log: RunLog) -> None:
    """Initialize the weights: from a model's folder, with new adapters, or all drawn
    from the seed."""
    run, local = rank.run, rank.part.local
    if hub := run.hub:
        # Adapters have no values in the folder, so they are drawn.
        local.draw(run.seed, adapts)
        begin(partial(HubReader, run.hub_folder), local, rank.part.updates)
        log.event("model", f"the weights are those of {hub}")
        return
    if mistake := random_by_name(run):
        raise RunError("run", [mistake])
    local.draw(run.seed)
