"""`Trainer`: trains a vessel by iterations of "collect, update, sometimes validate".

A trainer is a `leyden.loop.TrainLoop`, the loop that LLM agents are trained on. The loop owns the
order of stages, hooks, counters, metrics and checkpoints. The trainer adds the environments, which
are made when the first stage needs them, live as long as the run and get the seeds of each stage;
and the metrics of episodes while they are collected. It knows no algorithm: the vessel decides what
a stage does.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

from leyden.components import accepts
from leyden.errors import ConfigError
from leyden.host.child import exit_if_starting
from leyden.loop import (
    Callback,
    Checkpoint,
    LogBuffer,
    LogCollector,
    LogLevel,
    LogWriter,
    Resumable,
    SavedFile,
    TrainLoop,
    graceful_interrupts,
    open_checkpoint,
)
from leyden.loop.metrics import MetricValue, Stage, clean_metrics
from leyden.loop.rng import restore_rng
from leyden.loop.train_loop import Flow, keyed
from leyden.options import check_number
from leyden.rl.env import EnvWrapper, FiniteEnvType, FiniteVectorEnv, vectorize_env
from leyden.rl.env.factory import env_kind
from leyden.rl.env.randomness import WorkerSeeds
from leyden.rl.seed import SeedsLike
from leyden.rl.trainer.vessel import Iteration, Seeds, TrainingVesselBase
from leyden.runs.beginning import begin_run
from leyden.runs.config import describe, describe_dataset, describe_program, import_path
from leyden.runs.folder import MANIFEST
from leyden.runs.folder_loop import FolderCallback, FolderWriter, recording
from leyden.runs.recording import FolderRecorder


class Trainer(TrainLoop):
    """Train vessels; each `fit` is one run. Callbacks get the trainer and the vessel in every hook.

    max_iters: iterations in all, including those before a resume; None: until a callback stops the
        run.
    val_every_n_iters: validate each time this many iterations are done; None: never.
    loggers: writers of metrics; each takes the rows of stages, episodes or steps.
    callbacks: called between the stages.
    finite_env_type: where the simulators run: "dummy" (here), "thread", "subproc", "shmem".
    concurrency: the number of simulators that run at once.
    fast_dev_run: every stage uses only this many initial states, to see that everything fits
        together.
    env_options: further options of `vectorize_env`.
    run_dir: the folder in which a fit is recorded as a run, with `run.json`, `metrics.jsonl`,
        `failures.jsonl` and `run.log`; `leyden.runs.open_run` reads it. None: nothing is recorded.

    `loggers` ends with a `LogBuffer`, which keeps `metrics`, `current_episode` and `total_steps` up
    to date while episodes are collected.
    """

    def __init__(
        self,
        *,
        max_iters: int | None = None,
        val_every_n_iters: int | None = None,
        loggers: LogWriter | Sequence[LogWriter] | None = None,
        callbacks: Sequence[Callback] | None = None,
        finite_env_type: FiniteEnvType = "subproc",
        concurrency: int = 2,
        fast_dev_run: int | None = None,
        env_options: Mapping[str, Any] | None = None,
        run_dir: str | Path | None = None,
    ) -> None:
        check_number("fast_dev_run", fast_dev_run, at_least=1, whole=True, or_none="all initial states")
        check_number("concurrency", concurrency, at_least=1, whole=True)
        self.finite_env_type: FiniteEnvType = finite_env_type
        self.concurrency = concurrency
        self.fast_dev_run = fast_dev_run
        self.env_options = dict(env_options or {})
        self.run_dir = None if run_dir is None else Path(run_dir)
        self._recorded: tuple[FolderWriter, FolderCallback] | None = None
        """The parts that record the newest fit."""
        self._interrupted = False
        self.vessel: TrainingVesselBase[Any] | None = None
        """The vessel of the newest fit or test."""
        self._venv: FiniteVectorEnv | None = None
        self._worker_seeds: WorkerSeeds | None = None
        self._loaded: Mapping[str, Any] | None = None
        self._vessel_state: Any = None
        given: Any = () if loggers is None else loggers
        several = isinstance(given, Sequence) and not isinstance(given, str)
        super().__init__(
            max_iters=max_iters,
            val_every_n_iters=val_every_n_iters,
            callbacks=callbacks or (),
            writers=cast("Sequence[LogWriter]", given if several else (given,)),
        )
        me = weakref.proxy(self)  # neither the buffer nor the vessel keeps the trainer alive

        def update_metrics(on_episode: bool, on_collect: bool, log_buffer: LogBuffer) -> None:
            me._metrics_callback(on_episode, on_collect, log_buffer)

        def report(done: int, total: int, **counts: float) -> None:
            me.progress(done, total, **counts)

        self._report = report
        self._buffer = LogBuffer(update_metrics, self._min_loglevel())
        self.writers.append(self._buffer)

    # ---- where the run is ------------------------------------------------------------------------

    def initialize(self) -> None:
        """Set every counter and flag to its value at the beginning of a run."""
        super().initialize()
        self.current_episode = 0
        """Training episodes that have ended in this run."""
        self.total_steps = 0
        """The environment steps of these episodes."""
        self._has_record = False

    @property
    def loggers(self) -> list[LogWriter]:
        """The writers, the trainer's `LogBuffer` last."""
        return self.writers

    def named_callbacks(self) -> dict[str, Callback]:
        """Return the callbacks by the names of their states in a checkpoint."""
        return keyed(self.callbacks)

    def named_loggers(self) -> dict[str, LogWriter]:
        """Return the writers by the names of their states in a checkpoint."""
        return keyed(self.loggers)

    def _min_loglevel(self) -> LogLevel:
        """Return the lowest level that any writer keeps: nothing below it leaves an environment."""
        return min((writer.loglevel for writer in self.loggers), default=LogLevel.PERIODIC)

    # ---- runs ------------------------------------------------------------------------------------

    def fit(
        self,
        vessel: TrainingVesselBase[Any],
        ckpt_path: str | Path | Resumable | None = None,
        *,
        resume: bool = False,
    ) -> None:
        """Train `vessel` from the beginning, from a checkpoint, or from a state loaded since the
        last fit.

        ckpt_path: a checkpoint's directory, a directory of checkpoints (its newest intact one), a
            `.pth` file of `Checkpoint`, or the value of `Checkpoint.latest()`; None: no checkpoint.
        resume: continue the run in `run_dir`, from `ckpt_path` or else from the newest checkpoint
            in its `checkpoints/`, if there is one. Its recorded metrics are cut there. Another
            policy class is refused, other differences are logged.

        The first Ctrl-C ends the run after the stage under way and keeps it. Raise CheckpointError
        for a checkpoint that is damaged or of another vessel, and ConfigError for a stage that the
        vessel lacks, both before anything has begun. Raise ConfigError for a `run_dir` that holds
        a run already, unless `resume` is true.
        """
        exit_if_starting()
        if self._started_at is not None:
            raise ConfigError("this trainer is in the middle of a run; make another trainer for another fit")
        if resume and self.run_dir is None:
            raise ConfigError("resume=True needs a run; give the trainer run_dir=, or give ckpt_path= without resume")
        if self.max_iters is None and not self.callbacks:
            raise ConfigError(
                "max_iters is None and there is no callback that could end the run; give max_iters or EarlyStopping"
            )
        if resume and ckpt_path is None:
            ckpt_path = self._newest_checkpoint()
        self._draw_worker_seeds()
        start = open_checkpoint(ckpt_path) if isinstance(ckpt_path, str | Path) else ckpt_path
        if start is None and self._loaded is not None:
            state = dict(self._loaded)
            start = SavedFile(Path("state_dict"), state["current_iter"], state, state["vessel"])
        vessel.require_stage("train")
        if self.validates:
            vessel.require_stage("val")
        self._assign(vessel)
        self._loaded = None
        self.initialize()
        self._has_record = True
        folder = self._record(vessel, resume=resume)
        self._interrupted = False
        with contextlib.nullcontext() if folder is None else recording(folder), graceful_interrupts(self._interrupt):
            self.run(cast(Any, vessel), resume=start)
            if folder is not None and self._interrupted:
                folder.close("stopped", "interrupted")

    def _newest_checkpoint(self) -> Resumable | None:
        """Return the newest checkpoint of the run in `run_dir`, or None if it had none yet."""
        assert self.run_dir is not None
        found = Checkpoint(self.run_dir / "checkpoints").latest()
        if found is None and not (self.run_dir / MANIFEST).exists():
            raise ConfigError(f"{self.run_dir} holds no run to resume: it has neither {MANIFEST} nor a checkpoint")
        return found

    def _interrupt(self) -> None:
        self._interrupted = True
        self.stop()

    def _record(self, vessel: TrainingVesselBase[Any], *, resume: bool) -> FolderRecorder | None:
        """Begin to record this fit, or return None."""
        if self._recorded is not None:
            self.writers.remove(self._recorded[0])
            self.callbacks.remove(self._recorded[1])
            self._recorded = None
        if self.run_dir is None:
            return None
        continues = resume and (self.run_dir / MANIFEST).exists()  # earlier versions wrote none
        directory, manifest = begin_run(self.run_dir, resume=continues, kind="rl", config=self._run_config(vessel))
        folder = FolderRecorder(directory, manifest)
        self._recorded = FolderWriter(folder), FolderCallback(folder)
        self.writers.insert(0, self._recorded[0])
        self.callbacks.insert(0, self._recorded[1])
        return folder

    def _run_config(self, vessel: TrainingVesselBase[Any]) -> dict[str, Any]:
        """Return what `run.json` says about a fit: algorithm with options, data, seed, concurrency,
        program.
        """
        states = {name: getattr(vessel, f"{name}_initial_states", None) for name in ("train", "val")}
        options = {
            "max_iters": self.max_iters,
            "val_every_n_iters": self.val_every_n_iters,
            "finite_env_type": self.finite_env_type,
            "update_kwargs": getattr(vessel, "update_kwargs", {}),
            "episode_per_iter": getattr(vessel, "episode_per_iter", None),
            "reward": vessel.reward,
        }
        return {
            "algorithm": {"name": import_path(type(vessel.policy)), "options": describe(options)},
            "model": None,
            "data": {name: _describe_states(found) for name, found in states.items()},
            "seed": getattr(vessel, "seed", None),
            "concurrency": self.concurrency,
            **describe_program(),
        }

    def test(self, vessel: TrainingVesselBase[Any]) -> Mapping[str, MetricValue]:
        """Run every initial state of the test once. Return the metrics.

        They are also in `metrics`, without a prefix. The writers continue the record of this
        trainer's fit, if there was one. A hook of a fit may call it too; then `metrics` and
        `current_stage` are those of the fit again afterwards.
        """
        exit_if_starting()
        vessel.require_stage("test")
        if self._started_at is not None:
            return self._test_within(vessel)
        self._draw_worker_seeds()
        self._assign(vessel)
        self.initialize_iter()
        recorded, self._has_record = self._has_record, True
        if recorded:
            for writer in self.writers:
                writer.load_state_dict(writer.state_dict())
        self._drive(self._closing(self._recording(cast(Any, vessel), self._test(vessel))))
        return dict(self.metrics)

    def _test_within(self, vessel: TrainingVesselBase[Any]) -> Mapping[str, MetricValue]:
        """Test from a hook of a run, whose writers are open."""
        run = {name: getattr(self, name) for name in ("vessel", "metrics", "current_stage", "last_row", "_venv")}
        try:
            self.metrics, self._venv = {}, None
            self._assign(vessel)
            self._drive(self._closing(self._test(vessel)))
            return self.metrics
        finally:
            for name, value in run.items():
                setattr(self, name, value)

    def _test(self, vessel: Any) -> Flow:
        self._begin("test")
        yield from self._call("on_test_start", vessel)
        metrics = self._run_stage("test", vessel, vessel.test_seed_iterator, vessel.test)
        self._write("test", metrics, f"{type(vessel).__name__}.test")
        yield from self._call("on_test_end", vessel)

    def _assign(self, vessel: TrainingVesselBase[Any]) -> None:
        vessel.require_policy_of_these_spaces()
        self.vessel = vessel
        vessel.assign_trainer(self)
        vessel.iteration = self._iteration()
        if self._vessel_state is not None:
            state, self._vessel_state = self._vessel_state, None
            vessel.load_state_dict(state)

    def _iteration(self) -> Iteration:
        return Iteration(self.current_iter, self.fast_dev_run, self._report)

    # ---- stages ----------------------------------------------------------------------------------

    def venv_from_iterator(self, iterator: SeedsLike) -> FiniteVectorEnv:
        """Make environments of this trainer's vessel over these initial states.

        Close them, or use them in `with`.
        """
        vessel = self.vessel
        if vessel is None:
            raise ConfigError(
                "the trainer has no vessel yet; call fit or test, or vessel.assign_trainer and set trainer.vessel"
            )
        make = partial(
            _environment,
            vessel.simulator_fn,
            vessel.state_interpreter,
            vessel.action_interpreter,
            vessel.reward,
            vessel.aux_info_collector,
            self._min_loglevel(),
        )
        options: dict[str, Any] = {} if self._worker_seeds is None else {"seed": self._worker_seeds}
        return vectorize_env(
            make, self.finite_env_type, self.concurrency, self.loggers, seeds=iterator, **options | self.env_options
        )

    def _draw_worker_seeds(self) -> None:
        """Draw the seeds of the workers' generators before a checkpoint's random states are
        restored.

        The restore then ends with exactly the saved states.
        """
        if "seed" not in self.env_options and accepts(env_kind(self.finite_env_type), "seed"):
            self._worker_seeds = WorkerSeeds.draw()

    def _flow(self, vessel: Any, resume: Resumable | None) -> Flow:
        return self._closing(super()._flow(vessel, resume))

    def _closing(self, flow: Flow) -> Flow:
        try:
            yield from flow
        finally:
            venv, self._venv = self._venv, None
            if venv is not None:
                venv.close()

    def _do_train(self, vessel: Any) -> Mapping[str, MetricValue]:
        return self._run_stage("train", vessel, vessel.train_seed_iterator, vessel.train)

    def _do_validate(self, vessel: Any) -> Mapping[str, MetricValue]:
        return self._run_stage("val", vessel, vessel.val_seed_iterator, vessel.validate)

    def _run_stage(
        self,
        stage: Stage,
        vessel: TrainingVesselBase[Any],
        make_seeds: Callable[[], Seeds],
        run: Callable[[FiniteVectorEnv], object],
    ) -> Mapping[str, MetricValue]:
        """Run one stage.

        Return its metrics: of its episodes, of the vessel, and the run's totals.
        """
        vessel.iteration = self._iteration()
        self._buffer.clear()
        seeds = make_seeds()
        with seeds if isinstance(seeds, AbstractContextManager) else nullcontext(seeds) as iterator:
            if self._venv is None:
                self._venv = self.venv_from_iterator(iterator)
            else:
                self._venv.use_seeds(iterator)
            returned = run(self._venv)
        source = f"{type(self.vessel).__name__}, stage {stage!r},"
        metrics = {**self._buffer.collect_metrics(), **clean_metrics(returned, source=source)}
        if stage == "test" or not metrics:  # a test is no part of the run; a row of totals alone says nothing
            return metrics
        totals = {"total_episodes": self.current_episode, "total_steps": self.total_steps}
        if taken := sorted(totals.keys() & metrics.keys()):
            raise ConfigError(
                f"{source} has a metric named {taken[0]!r}, which the trainer writes itself; log it under another name"
            )
        return {**metrics, **totals}

    def _metrics_callback(self, on_episode: bool, on_collect: bool, log_buffer: LogBuffer) -> None:
        """Update `metrics` and the counters. A `LogBuffer` calls this.

        on_episode: an episode has ended, and `metrics` gets its values. Otherwise a collect has
        ended (`on_collect`), and `metrics` gets the means of its episodes.
        """
        metrics = log_buffer.episode_metrics() if on_episode else log_buffer.collect_metrics()
        if on_episode and self.current_stage == "train":
            self.current_episode += 1
            self.total_steps += int(metrics["steps_per_episode"])
        prefix = "val/" if self.current_stage == "val" else ""
        self.metrics.update({prefix + name: value for name, value in metrics.items()})

    # ---- state -----------------------------------------------------------------------------------

    def run_state(self) -> dict[str, Any]:
        """Return the state of the run without the vessel, as JSON."""
        return {**super().run_state(), "current_episode": self.current_episode, "total_steps": self.total_steps}

    def load_run_state(self, state: dict[str, Any]) -> None:
        """Restore the counters of a run from its checkpoint."""
        super().load_run_state(state)
        self.current_episode, self.total_steps = state["current_episode"], state["total_steps"]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of a run: vessel, callbacks, loggers, counters, flags, metrics, random
        states.

        The weights that `EarlyStopping` keeps are in its checkpoints only.
        """
        return {**self.run_state(), "vessel": {} if self.vessel is None else self.vessel.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a value of `state_dict`, in this trainer or a fresh one.

        The next `fit` without a checkpoint continues from it. A trainer that has no vessel yet
        restores the vessel's state when it gets one. `should_stop` is restored for reading; a fit
        always begins with False.
        """
        self.load_run_state(dict(state))
        self.should_stop = bool(state["should_stop"])
        if self.vessel is None:
            self._vessel_state = state["vessel"]
        else:
            self.vessel.load_state_dict(state["vessel"])
        restore_rng(state["rng"])
        self._loaded, self._has_record = state, True

    @staticmethod
    def get_policy_state_dict(ckpt_path: str | Path) -> dict[str, Any]:
        """Return the policy's state in a checkpoint, for a policy that is used elsewhere."""
        return open_checkpoint(ckpt_path).vessel_state["policy"]


def _describe_states(states: Any) -> dict[str, Any] | None:
    """Return the length and the digest of initial states; None for states that have no length, such
    as a generator.
    """
    has_items = hasattr(states, "__len__") and hasattr(states, "__getitem__")
    return describe_dataset(states) if has_items else None


def _environment(
    simulator_fn: Any,
    state_interpreter: Any,
    action_interpreter: Any,
    reward: Any,
    aux_info: Any,
    min_loglevel: LogLevel,
) -> EnvWrapper[Any, Any, Any, Any, Any]:
    """Make one environment.

    Its interpreters and reward are copies, because each knows its environment.
    """
    own = map(_copy, (state_interpreter, action_interpreter, reward, aux_info))
    state_interpreter, action_interpreter, reward, aux_info = own
    return EnvWrapper(
        simulator_fn, state_interpreter, action_interpreter, None, reward, aux_info, LogCollector(min_loglevel)
    )


def _copy(part: Any) -> Any:
    try:
        return copy.deepcopy(part)
    except Exception as error:
        raise ConfigError(
            f"each environment has a {type(part).__name__} of its own, and this one cannot be copied: {error}. Make what it holds "
            "when it is first used, or write its __deepcopy__"
        ) from error
