"""A training run on one rank: steps from where the last checkpoint is to the end, or to a stop.

Every rank calls `train` with the same run. What a rank holds is in `rank.py`, what its steps are
made of in `executor.py`, what is logged in `log.py`, what is kept in `checkpoint.py`.
"""

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..comm import World
from ..comm.agree import agreement, broadcast_text, errors_of, exchange
from ..hang import Positions
from ..hang.positions import STEP
from ..layout import Layout, LayoutError, recipe
from ..layout.choices import FP32
from ..layout.run import Run, RunError, random_by_name, refuse_random_by_name
from ..layout.url import Url
from ..parallel.compile import graphs
from ..parallel.model import is_lora
from ..program import Span, Timeline
from .agreement import agreed_data
from .checkpoint import Saved, Saver, steps
from .checkpoint_exchange import HubReader
from .checkpoint_format import RUN_ID, CheckpointError, Progress
from .checkpoint_load import begin, changed_settings, data_notices, load, newest
from .checkpoint_memory import MemoryCheckpoints, memory_folder
from .checkpoint_remote import ENDING, Remote, Uploader, claim
from .copies import Copies
from .data.digests import fingerprint, table_of
from .data.token_files import DataError
from .executor import StepResult
from .lock import RunLocked, hold_as_rank, hold_run, owner_of, unshared
from .log import RunLog, memory_of, rank_log
from .optimizer import learning_rate
from .precision import device_notices
from .program import shape_of
from .rank import Rank, keep_freed_memory
from .remote_owner import Ownership, run_id
from .remote_task import ROUND
from .starts import DoneSteps
from .stop import FOR_GOOD, REMOVED, STOP, StopError, StopRequests, remove_stale_stop, stop_requests
from .stragglers import OwnTime, Stragglers
from .watched import tell_compilations, watched

IN_A_ROW = 3  # so many steps that are not finite end a run


class TrainError(ValueError):
    """A run that cannot go on: at which step, why, and what to do."""

    exit_code = 1


class CopiesDiffer(TrainError):
    """Copies of a weight that were equal bit by bit and no longer are. A restart goes back to equal ones."""

    restart_helps = True


@dataclass(frozen=True)
class Outcome:
    """The end of a run. `stopped`: a signal of this name or a STOP file ended it before its last
    step. `unsaved`: the reason why its last save failed, if the run continues without saves.
    `not_uploaded`: the reason why its newest checkpoint, complete on the disk, is not at
    `checkpoint.remote`."""

    step: int
    loss: float | None
    validation: float | None
    stopped: bool
    unsaved: str = ""
    by: str = ""  # what has stopped it: STOP, SIGTERM, ...
    not_uploaded: str = ""


def train(
    world: World, run: Run, layout: str = "", quiet: bool = False, held: bool = False
) -> Outcome:
    """Train to the end, or until asked to stop; every rank of the world calls it.

    Without a layout it is that of the run which has as many ranks as the world; `auto` is then the
    recipe's, as only the command plans.
    `held`: the process that started the ranks holds the run's folders (`lock.py`); else rank 0 does.
    """
    refuse_random_by_name(run)
    with (
        _only_run(world, run, held=held),
        hold_as_rank(Path(run.out), run.checkpoints),
        rank_log(Path(run.out), world.rank, world.size) as log,
        watched(world, run) as positions,
    ):
        chosen = Layout.parse(layout) if layout else _layout_of(run, world)
        log.info("layout %s on %s", chosen or "of one rank", world.device)
        if world.device.type == "cpu":
            keep_freed_memory()
        rank = Rank(world, run, chosen, drawn=False)
        with stop_requests(Path(run.out, STOP), first=world.rank == 0) as requests:
            rank.trainer.wants_to_stop = requests
            loop = _Loop(rank, positions, requests, quiet=quiet)
            try:
                outcome = loop.run()
                log.info("%s", outcome)
                return outcome
            finally:
                loop.close()


def _layout_of(run: Run, world: World) -> Layout:
    shape = shape_of(run)
    layout = run.for_ranks(world.size).layout_of(shape)
    if layout is None:
        tokens, precision = run.tokens(shape), run.precision or FP32
        made = recipe(shape, world.size, batch=shape.batch, sequence=tokens, precision=precision)
        layout = run.divided(made, shape.batch)
    if layout.ranks != world.size:
        raise LayoutError(
            f"layout {str(layout)!r} is for {layout.ranks} ranks, and there are {world.size}."
            " Set train.fallback to layouts for other numbers of ranks."
        )
    return layout


@contextmanager
def _only_run(world: World, run: Run, *, held: bool) -> Iterator[None]:
    """Hold the run's folders by rank 0; where another run has them, every rank raises the same."""
    if held:
        yield
        return
    begun = time.time()
    with agreement(world) as facts:  # else it is the folder that is not shared
        facts["out"] = run.out
    start, refusal = world.split("start", [range(world.size)]), ""
    with ExitStack() as stack:
        if world.rank == 0:
            try:
                stack.enter_context(hold_run(Path(run.out), run.checkpoints))
                remove_stale_stop(run, begun, launched=True)
            except (RunLocked, StopError, OSError) as error:
                refusal = str(error)
        if refusal := broadcast_text(start, refusal):
            raise RunLocked(refusal)
        owner = broadcast_text(start, owner_of(run.checkpoints))
        if unseen := errors_of(start, unshared(run.checkpoints, owner)):
            raise RunLocked("; ".join(unseen[:4]))
        yield


class _Loop:
    """The steps of one start of a run."""

    def __init__(
        self, rank: Rank, positions: Positions, requests: StopRequests, *, quiet: bool
    ) -> None:
        self.requests = requests
        self.rank, self.run_, self.trainer = rank, rank.run, rank.trainer
        self.positions = positions
        for executor in (rank.trainer, rank.validator):
            executor.write_to(positions, rank.names)
        if rank.layout.compile:
            tell_compilations(positions)
        self.everyone = rank.local.groups.everyone
        # Before the log is opened: ranks with other data leave the run's folder as it is.
        with positions.phase("starting", f"reading {rank.batches.name} for its digest"):
            self.data = agreed_data(self.everyone, rank.batches.corpora)
        self.log = RunLog(rank.run, positions, active=rank.world.rank == 0, quiet=quiet)
        kept = rank.run.checkpoint
        self.saver = Saver(
            rank.run.checkpoints, rank.local, rank.updates,
            keep=kept.keep, asynchronous=kept.asynchronous,
            on_failure="stop" if kept.on_disk_full == "stop" else "go on",
            spare=lambda: self.uploader.current if self.uploader else None,
        )  # fmt: skip
        self.owner: Ownership | None = None
        self.uploader: Uploader | None = None
        self.run_id = ""  # of rank 0's manifests, which are those of all
        self.done_steps: DoneSteps | None = None  # for whoever starts the ranks again
        if rank.world.rank == 0:
            self.done_steps = DoneSteps(Path(rank.run.out))
            out, found = Path(rank.run.out), newest(rank.run.checkpoints)
            local = found[1] if found else None
            self.run_id = run_id(out, local)
            if kept.remote:
                self.owner = Ownership(kept.remote, out, local)
        self.remote: Remote | None = None
        if kept.remote:
            self.remote = Remote(Url(kept.remote), kept.remote_timeout, self.owner)
        self.memory: MemoryCheckpoints | None = None
        if rank.run.train.in_memory:
            folder = memory_folder(rank.run)  # on every host, if something there outlives the ranks
            if errors_of(self.everyone, "" if folder else "none"):
                text = "no checkpoints in memory: they need ranks that are processes, or torchrun's"
                self.log.event("not kept", text)
            elif folder:
                self.memory = MemoryCheckpoints(folder, positions.host, rank.local, rank.updates)
        self.copies: Copies | None = None
        self.bad = 0
        self.stops = 0.0  # ranks that were asked to stop by the end of the last step
        self.own = OwnTime(queued=rank.world.device.type == "cuda")
        self.stragglers = Stragglers(rank.run.hang.straggler, rank.program.owner)
        self.unsaved = ""
        self.loss: float | None = None
        self.validation: float | None = None

    def run(self) -> Outcome:
        run = self.run_
        with self.positions.phase("reading a checkpoint", str(run.checkpoints)):
            self._claim()
            try:
                start = self._resume()
            except ValueError:
                if self.uploader:  # no other machine waits until the heartbeat of this one is old
                    self.uploader.release().finished.wait(ENDING)
                raise
        if run.train.check_copies:
            self.copies = Copies(self.rank.local, self.rank.updates, self.rank.names)
        for notice in self.rank.batches.notices:
            self.log.event("data", notice)
        for notice in self.rank.notices:
            self.log.event("model", notice)
        for notice in device_notices(self.rank.layout, self.rank.world.device):
            self.log.event("device", notice)
        self.log.start(
            start, self.rank.flops, self.rank.peak(),
            tokens=self.rank.shape.batch * self.rank.tokens,
            layout=str(self.rank.layout), ranks=self.rank.world.size,
            model=asdict(self.rank.shape), sequence=self.run_.tokens(self.rank.shape),
            own=self.run_.own, parameters=self.rank.parameters,
            data=self.rank.batches.name,
            held=sum(unit.part for unit in self.rank.local.every_unit),
        )  # fmt: skip
        done, stopped, by = start, False, ""
        self.positions.begin()
        self.looked_at = min(start + run.profile.start, run.steps - 1)
        with _profiled(self.rank) as stepped:
            for step in range(start, run.steps):
                self.positions.words[STEP] = step
                try:
                    with self.positions.phase("in a step" if step > start else "first step"):
                        self._step(step)
                    stepped()
                    done, self.stops = step + 1, self.result.stops
                    if self.done_steps:
                        self.done_steps.write(done)
                    stopped = self.stops > 0 and done < run.steps
                    self._after(done, stopped=stopped)
                except DataError as unusable:  # the run had begun: no mistake in the command
                    raise TrainError(f"step {step + 1}: {unusable}") from unusable
                if stopped:
                    break
        with self.positions.phase("saving", str(run.checkpoints)):
            self._decided(self.saver.finish())
        not_uploaded = ""
        if self.remote is not None:
            with self.positions.phase("saving", f"the upload to {self.remote.url}"):
                not_uploaded = self._end_uploads()
        if self.memory:
            self.memory.close()
        self._tell_graphs(done)
        if stopped:
            by = self._stopped_by()
            asked = f"asked to stop by {by}"
            if by == REMOVED:
                asked = f"{run.out} was removed or renamed during the run"
            text = f"{asked}: saved at step {done}; the same command continues from there"
            if self.unsaved:
                text = f"{asked}: step {done} could not be saved: {self.unsaved}"
            self.log.event("stop", text, step=done, by=by)
        else:
            self.log.event("end", step=done, loss=self.loss, validation=self.validation)
        return Outcome(done, self.loss, self.validation, stopped, self.unsaved, by, not_uploaded)

    def _stopped_by(self) -> str:
        """The cause of the stop, the same on all ranks: one for good, or else the first signal."""
        each_rank = errors_of(self.everyone, self.requests.by)
        names = [each.partition(": ")[2] for each in each_rank]
        return next((name for name in names if name in FOR_GOOD), names[0])

    def close(self) -> None:
        """End what goes on beside the steps, however the run ends."""
        if self.done_steps:
            self.done_steps.close()
        if self.uploader:
            self.uploader.close()
        self.log.close()

    def _resume(self) -> int:
        """The step to go on with, from the newest sound checkpoint."""
        run, rank, local, kept = self.run_, self.rank, self.rank.local, self.run_.checkpoint
        where: Any = {"adopt": kept.adopt, "remote": self.remote, "memory": self.memory}
        where |= {"identity": rank.identity, "optimizer": run.optimizer.name}
        loaded = load(run.checkpoints, local, rank.updates, **where)
        if loaded and self.owner and self.uploader:
            self.owner.resumed(loaded.progress)
            if loaded.path.parent == run.checkpoints:
                self.uploader.offer(loaded.path)  # it may be there, or its upload was cut
        self.run_id = self.owner.run if self.owner else self.run_id
        if loaded is None and (hub := run.hub):
            local.draw(run.seed, is_lora)
            begin(partial(HubReader, Path(hub)), local, rank.updates)
            self.log.event("model", f"the weights are those of {hub}")
            return 0
        if loaded is None:
            if mistake := random_by_name(run):
                raise RunError("run", [mistake])
            local.draw(run.seed)
            return 0
        at, batches = loaded.progress, rank.batches
        if at.seed != run.seed:
            raise CheckpointError(
                f"{loaded.path} was begun with seed = {at.seed}, the run says {run.seed}."
                f" Write seed = {at.seed}, or another `out`."
            )
        rank.batches = batches.resumed(at.step, at.cursor)
        scaling, scale = self.trainer.scaling, at.state.get("loss_scale")
        if scaling and scale is not None:
            scaling.scale, scaling.steady = scale  # the manifest's reader has checked both
        settings = changed_settings(at, run, rank.layout, rank.shape)
        notices = {"damaged": loaded.damaged, "model": loaded.notices, "settings": settings}
        for event, texts in notices.items():
            for text in texts:
                self.log.event(event, text)
        if rank.world.rank == 0:  # which alone may have to read some of it
            for text in data_notices(at, loaded.path, self.data, batches):
                self.log.event("data", text)
        self.log.event("resume", f"resuming at step {at.step} from {loaded.path} ({at.layout})")
        return at.step

    # ---- the remote folder

    def _claim(self) -> None:
        """Claim the remote folder for this run before anything there is read or changed."""
        if self.remote is None:
            return
        answer = claim(self.remote, self.everyone)
        if answer.error:
            text = f"{self.remote.url} cannot be claimed yet: {answer.error}"
            self.log.event("remote", f"{text}. Each upload tries it again")
        if self.owner:
            self.uploader = Uploader(self.remote, self.run_.checkpoint.keep)

    def _end_uploads(self) -> str:
        """Wait for the last upload while it makes progress; returns why the newest checkpoint is not
        there, on all ranks. A signal or a STOP file that has not ended the steps ends the wait."""
        # As all ranks have agreed in the last step: a request that came after it is a new one.
        stopped = self.stops > 0

        def waits(under_way: bool) -> bool:
            """Whether rank 0 is to wait on. The ranks meet again and again, so that none waits long."""
            asked = self.trainer.wants_to_stop() and not stopped
            flags = torch.tensor([int(under_way), int(asked)], device=self.everyone.device)
            self.everyone.all_reduce(flags)
            return bool(flags[0]) and not flags[1]

        uploader = self.uploader
        while waits(uploader.under_way(ROUND) if uploader else False):
            self._uploaded()
        if uploader:
            uploader.stop("a signal, or a STOP file, ended the wait for it")
        release = uploader.release() if uploader and not uploader.stuck else None
        end = time.monotonic() + ENDING
        while waits(bool(release and not release.finished.wait(ROUND) and time.monotonic() < end)):
            pass
        self._uploaded()
        return broadcast_text(self.everyone, uploader.missing if uploader else "")

    # ---- one step

    def _step(self, step: int) -> None:
        begun = time.perf_counter()
        self.positions.waits.clear()
        lr = learning_rate(self.run_.optimizer, step, self.run_.steps)
        with self.positions.phase("loading data", self.rank.batches.name):
            own = self.rank.batch(step)
        first, read = begun, time.perf_counter()
        if step == self.looked_at:
            self.everyone.barrier()
            begun = time.perf_counter()
        self.result = result = self.trainer.step(own, lr)
        self.loss = result.total
        if result.finite:
            self.bad = 0
        else:
            self._not_finite(step)
        ended = time.perf_counter()
        self.log.seconds.append(ended - begun)
        waits = self.positions.waits
        self.own.add(ended - first, read - first, result.timeline.spans, waits)
        if step == self.looked_at:
            self._look(step, result, begun)
        last = result.stops or step + 1 == self.run_.steps
        if last or _due(step + 1, self.run_.metrics.every):
            self._log_step(step + 1, lr)

    def _log_step(self, done: int, lr: float) -> None:
        most = memory_of(self.rank.world.device, self.rank.world.sharing)
        own = torch.tensor([most, *self.own.taken()], dtype=torch.float64)
        own = own.to(self.everyone.device)
        table = own.new_empty(self.everyone.size, len(own))  # a row for each rank
        self.everyone.all_gather(table, own)
        with self.everyone.reading():
            table = table.cpu()
        norm = math.nan if self.result.norm is None else self.result.norm
        numbers = {"loss": self.result.total, "norm": norm, "lr": lr}
        steps = len(self.log.seconds)
        self.log.step(done, numbers | {"memory": float(table[:, 0].max())})
        if self.log.active:
            for slow in self.stragglers.look(table[:, 1:].tolist(), steps):
                self.log.event("straggler", str(slow), step=done, **slow._asdict())

    def _not_finite(self, step: int) -> None:
        """The step was skipped everywhere: name the first bad piece, and end after a few in a row."""
        overflow = self.trainer.scaling is not None and math.isfinite(self.result.total)
        if overflow:  # float16's own way of finding its scale
            self.log.event("skip", step=step + 1, why="a float16 gradient overflowed")
            return
        first = self.trainer.first_bad(self.rank.names)
        each_rank = errors_of(self.everyone, "" if first is None else f"{first[0]:06} {first[1]}")
        sources: dict[str, list[str]] = {}
        for rank, _, what in (each.partition(": ") for each in each_rank):
            sources.setdefault(what, []).append(rank)
        why = "the loss or a gradient is not finite"
        if sources:
            what, ranks = min(sources.items())
            why += f"; first in {what.partition(' ')[2]} on {', '.join(ranks)}"
        else:
            why += "; every rank's own numbers were: it came of summing them"
        self.bad += 1
        text = f"step {step + 1} was skipped on all ranks: {why}"
        self.log.event("skip", text, step=step + 1, why=why)
        if self.bad >= IN_A_ROW:
            raise TrainError(
                f"steps {step + 2 - IN_A_ROW} to {step + 1}: {why}. The weights are those before"
                " them. Lower optimizer.lr, write optimizer.clip, or use bf16 or fp32."
            )

    def _look(self, step: int, result: StepResult, begun: float) -> None:
        """Writes each rank's operations and memory of this step to files for the report."""
        spans = tuple(
            Span(s.rank, s.lane, s.op, s.start - begun, s.end - begun)
            for s in result.timeline.spans
        )
        parts = exchange(self.everyone, json.dumps(Timeline(spans).to_json()), 0)
        self.log.timeline(step + 1, str(self.rank.layout), self.rank.program, parts)
        held = exchange(self.everyone, json.dumps(self.rank.memory()), 0)
        self.log.event("memory", step=step + 1, ranks=[json.loads(one) for one in held])
        self._tell_graphs(step + 1)

    def _tell_graphs(self, done: int) -> None:
        """Logs the graphs compiled so far."""
        if self.rank.layout.compile:
            made = graphs()
            text = f"step {done}  {made.compiled} graphs are compiled"
            if made.recompiles:
                text += f", {made.recompiles} of them for other shapes or Python values"
            self.log.event("compile", text, step=done, graphs=made.compiled, again=made.recompiles)

    # ---- after a step

    def _after(self, done: int, *, stopped: bool) -> None:
        run = self.run_
        last = done == run.steps
        if run.validation.batches and (last or _due(done, run.validation.every)):
            with self.positions.phase("validating"):
                self.validation = self.rank.validation()
                experts = self.rank.expert_tokens() if self.rank.shape.experts else []
            if self.validation is not None:
                bits = self.rank.batches.bits_per_byte(self.validation)
                self.log.validation(done, self.validation, bits, experts)
        in_memory = self.memory is not None and not last and not stopped
        in_memory = in_memory and _due(done, run.train.in_memory)
        ends = last and run.checkpoint.at_end
        on_disk = ends or stopped or _due(done, run.checkpoint.every)
        if in_memory or on_disk or _due(done, run.train.check_copies):
            self._compare_copies(done)  # before a save: a bad one must not follow a good one
        if self.memory and in_memory:
            with self.positions.phase("saving", str(self.memory.folder)):
                if errors := self.memory.save(self._progress(done)):
                    text = f"step {done}  not kept in memory: {errors[0]}"
                    self.log.event("not kept", text, step=done, error=errors[0])
        if on_disk:
            with self.positions.phase("saving", str(run.checkpoints)):
                self._decided(self.saver.save(self._progress(done)))
        else:
            self._decided(self.saver.poll())
        self._uploaded()
        while self.positions.notices:
            self.log.event("watcher", self.positions.notices.popleft())

    def _compare_copies(self, done: int) -> None:
        """End the run where ranks no longer hold the same bits; what was saved before is good."""
        if self.copies is None or not self.copies.any:
            return
        with self.positions.phase("comparing copies"):
            differences = self.copies.differences()
        if not differences:
            return
        with self.positions.phase("saving", str(self.run_.checkpoints)):
            self._decided(self.saver.finish())  # begun when the copies were equal
        self._uploaded()
        saved = steps(self.run_.checkpoints) if self.rank.world.rank == 0 else []
        last = str(saved[0]) if saved else "the beginning"
        last = broadcast_text(self.everyone, last)
        text = (
            f"step {done}: copies that were equal bit by bit differ. {differences}. Memory or a"
            " processor has changed a bit, or ranks do not compute alike. This state is not saved."
            f" The same command continues from {last}; if it names the same rank, replace its device."
        )
        self.log.event("copies", text, step=done, differences=differences)
        raise CopiesDiffer(text)

    def _uploaded(self) -> None:
        """Report what became of uploads, and of the claim to the remote folder."""
        if self.uploader is None or self.owner is None:
            return
        for upload in self.uploader.taken():
            error = upload.error
            text = f"step {upload.step}  not uploaded: {error}" if error else ""
            if upload.notice:
                text = f"step {upload.step}  uploaded, but {upload.notice}"
            values = {"step": upload.step, "url": self.run_.checkpoint.remote, "error": error}
            values |= {"notice": upload.notice} if upload.notice else {}
            self.log.event("upload", text, **values)
        while self.owner.notices:
            self.log.event("remote", self.owner.notices.pop(0))

    def _progress(self, done: int) -> Progress:
        batches, scaling = self.rank.batches, self.trainer.scaling
        state = {"loss_scale": [scaling.scale, scaling.steady]} if scaling else {}
        config: dict[str, Any] = {"run": asdict(self.run_), "model": self.rank.identity.record}
        config["data"] = table_of(self.data)
        config[RUN_ID] = self.run_id
        return Progress(
            done, batches.cursor(done), self.run_.seed, fingerprint(self.data),
            str(self.rank.layout), self.rank.shape, config, state,
        )  # fmt: skip

    def _decided(self, saves: tuple[Saved, ...]) -> None:
        for saved in saves:
            self.unsaved = saved.error
            text = f"not saved: {saved.error}" if saved.error else f"saved {saved.path}"
            text += f"; it is there and sound, but {saved.notice}" if saved.notice else ""
            values = {"step": saved.step, "path": str(saved.path), "error": saved.error}
            values |= {"notice": saved.notice} if saved.notice else {}
            if self.uploader and not saved.error:
                self.uploader.offer(saved.path)
            self.log.event("checkpoint", f"step {saved.step}  {text}", **values)


def _due(done: int, every: int) -> bool:
    return every > 0 and done % every == 0


@contextmanager
def _profiled(rank: Rank) -> Iterator[Callable[[], None]]:
    """Call what this gives after each step: those that the run wants traced are."""
    wanted, action = rank.run.profile, torch.profiler.ProfilerAction
    if wanted.nvtx and rank.world.device.type == "cuda":
        rank.trainer.ranges = lambda op: torch.cuda.nvtx.range(str(op))
    if not wanted.steps:
        yield lambda: None
        return

    def schedule(step: int) -> torch.profiler.ProfilerAction:
        if step == wanted.start + wanted.steps - 1:
            return action.RECORD_AND_SAVE
        return action.RECORD if 0 <= step - wanted.start < wanted.steps else action.NONE

    def export(trace: torch.profiler.profile) -> None:
        folder = Path(rank.run.out, "profile")
        folder.mkdir(parents=True, exist_ok=True)
        trace.export_chrome_trace(str(folder / f"rank-{rank.world.rank}.json"))

    rank.trainer.ranges = lambda op: torch.profiler.record_function(str(op))
    with torch.profiler.profile(schedule=schedule, on_trace_ready=export) as trace:
        yield trace.step
