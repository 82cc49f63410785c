"""`Trainer`: trains a vessel by iterations of "collect, update, sometimes validate".

A trainer is a `leyden.training.TrainLoop`, as for LLM agents. The loop owns the order of stages, hooks, counters,
metrics and checkpoints. The trainer adds the environments and the metrics of episodes while they are collected. The
environments are made for the first stage, live as long as the run, and get the seeds of each stage. The trainer knows
no algorithm: the vessel decides what a stage does.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast

from leyden._lib.components import KeepsArguments, accepts
from leyden._lib.host.child import exit_if_starting
from leyden._lib.options import check_flag, check_number
from leyden.doctor import FitWatch
from leyden.errors import ConfigError
from leyden.report import write_at_end
from leyden.rl.env import EnvWrapper, FiniteEnvType, FiniteVectorEnv, vectorize_env
from leyden.rl.env.factory import env_kind
from leyden.rl.env.randomness import WorkerSeeds
from leyden.rl.seed import SeedsLike
from leyden.rl.trainer.steering import SimulatorOptions
from leyden.rl.trainer.vessel import Iteration, Seeds, TrainingVessel, TrainingVesselBase
from leyden.training import (
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
from leyden.training.metrics import MetricValue, Stage, clean_metrics
from leyden.training.rng import restore_rng
from leyden.training.runs.folder import MANIFEST
from leyden.training.runs.folder_loop import FolderCallback, FolderWriter, recording, showing
from leyden.training.runs.opening import begin_run
from leyden.training.runs.recording import FolderRecorder
from leyden.training.runs.run_code import describe_code
from leyden.training.runs.run_description import (
    NOT_DEFAULT,
    changed_options,
    describe,
    describe_dataset,
    describe_program,
    import_path,
)
from leyden.training.runs.steering import Steering, steering_callbacks
from leyden.training.train_loop import Flow, keyed

_NO_SETTINGS = ("run_dir", "loggers", "progress", "report")
"""Options that say nothing about how a run trains."""
_DATA = ("train_initial_states", "val_initial_states", "test_initial_states")


class Trainer(KeepsArguments, TrainLoop):
    """Trains vessels; each `fit` is one run.

    max_iters: iterations in all, including those before a resume; None: until a callback stops the run.
    val_every_n_iters: iterations between two validations. None, or more than `max_iters`: one validation at the end, if
        the vessel has `val_initial_states` and the run is not stopped before.
    loggers: writers of metrics; each takes the rows of stages, episodes or steps.
    callbacks: called between the stages, with the trainer and the vessel.
    finite_env_type: where the simulators run: "dummy" (in this thread), "thread" (in threads), "subproc" (in processes)
        or "shmem" (in processes, with observations in shared memory).
    concurrency: the number of simulators that run at once.
    fast_dev_run: use only this many initial states in every stage, for a quick test that everything fits together;
        None: all.
    env_options: further options of `vectorize_env`.
    progress: whether `fit` writes a first line, a progress bar and a closing summary to standard error.
    run_dir: the folder in which a fit is recorded as a run, with `run.json`, `metrics.jsonl`, `failures.jsonl` and
        `run.log`; `leyden.training.runs.open_run` reads it. None: nothing is recorded.
    report: whether `fit` writes `report.html` into `run_dir` at its end, as `leyden report` does.

    `loggers` ends with a `LogBuffer`, which keeps `metrics`, `current_episode` and `total_steps` up to date while
    episodes are collected.
    """

    uses_val_initial_states: ClassVar[bool] = True
    """Whether a vessel's `val_initial_states` are used at least once, also without an interval."""

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
        progress: bool = True,
        report: bool = True,
    ) -> None:
        check_number("fast_dev_run", fast_dev_run, at_least=1, whole=True, or_none="all initial states")
        check_number("concurrency", concurrency, at_least=1, whole=True)
        check_flag("progress", progress)
        check_flag("report", report)
        self.finite_env_type: FiniteEnvType = finite_env_type
        self.concurrency = concurrency
        self.fast_dev_run = fast_dev_run
        self.env_options = dict(env_options or {})
        self.run_dir = None if run_dir is None else Path(run_dir)
        self.shows_progress, self.report = progress, report
        self._recorded: tuple[FolderWriter, Sequence[Callback]] | None = None
        """The writer and the callbacks that record and steer the newest fit."""
        self._steering: Steering | None = None
        self._interrupted: str | None = None
        """Why the newest fit was ended from outside; None if it was not."""
        self.vessel: TrainingVesselBase[Any] | None = None
        """The vessel of the newest fit or test."""
        self._venv: FiniteVectorEnv | None = None
        """The environments of the current run, from its first stage on."""
        self._worker_seeds: WorkerSeeds | None = None
        self._loaded: Mapping[str, Any] | None = None
        """The state of `load_state_dict`, from which the next fit continues."""
        self._vessel_state: Any = None
        """The vessel's part of a loaded state, until there is a vessel."""
        given: Any = () if loggers is None else loggers
        several = isinstance(given, Sequence) and not isinstance(given, str)
        super().__init__(
            max_iters=max_iters,
            val_every_n_iters=val_every_n_iters,
            callbacks=callbacks or (),
            writers=cast("Sequence[LogWriter]", given if several else (given,)),
        )
        me = weakref.proxy(self)  # so that neither the buffer nor the vessel keeps the trainer alive

        def update_metrics(on_episode: bool, on_collect: bool, log_buffer: LogBuffer) -> None:
            me._metrics_callback(on_episode, on_collect, log_buffer)

        def report_progress(done: int, total: int, **counts: float) -> None:
            me.progress(done, total, **counts)

        self._report = report_progress
        self._buffer = LogBuffer(update_metrics, self._min_loglevel())
        self.writers.append(self._buffer)

    # ---- where the run is ------------------------------------------------------------------------

    def initialize(self) -> None:
        """Set every counter and flag to its value at the beginning of a run."""
        super().initialize()
        self.current_episode = 0
        """Training episodes that have ended in this run."""
        self.total_steps = 0
        """The environment steps of the training episodes that have ended."""
        self._has_record = False
        """Whether the writers hold rows of this run, which a test continues."""

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
        return min((writer.loglevel for writer in self.loggers), default=LogLevel.PERIODIC)

    # ---- runs ------------------------------------------------------------------------------------

    def fit(
        self,
        vessel: TrainingVesselBase[Any],
        ckpt_path: str | Path | Resumable | None = None,
        *,
        resume: bool = False,
    ) -> None:
        """Train a vessel from the beginning, from a checkpoint, or from a state that was loaded.

        The first Ctrl-C ends the run after the current stage and keeps it.
        ckpt_path: a checkpoint's directory, a directory of checkpoints (for its newest intact one), a `.pth` file of
            `Checkpoint`, or the value of `Checkpoint.latest()`. None: start over, or from the state of
            `load_state_dict`.
        resume: continue the run in `run_dir`, from `ckpt_path` or else from the newest checkpoint in its
            `checkpoints/`, if there is one. Recorded metrics after it are removed. Another class of policy raises
            ConfigError; other differences are logged.
        Raise CheckpointError for a checkpoint that is damaged or of another vessel, and ConfigError for a stage that
        the vessel lacks, both before anything has begun. Raise ConfigError for a `run_dir` that holds a run already,
        unless `resume` is true.
        """
        exit_if_starting()
        self.check(vessel)
        if resume and self.run_dir is None:
            raise ConfigError("resume=True needs a run; give the trainer run_dir=, or give ckpt_path= without resume")
        if resume and ckpt_path is None:
            ckpt_path = self._newest_checkpoint()
        self._draw_worker_seeds()
        start = open_checkpoint(ckpt_path) if isinstance(ckpt_path, str | Path) else ckpt_path
        if start is None and self._loaded is not None:
            state = dict(self._loaded)
            start = SavedFile(Path("state_dict"), state["current_iter"], state, state["vessel"])
        self._assign(vessel)
        self._loaded = None
        self.initialize()
        self._has_record = True
        folder = self._record(vessel, resume=resume)
        self._interrupted, steering = None, self._steering

        def interrupt() -> None:
            self._interrupted = "interrupted"
            self.stop()
            if steering is not None:
                steering.wake()

        with contextlib.ExitStack() as stack:
            if self.shows_progress:
                stack.enter_context(self._showing(vessel, folder))
            if folder is not None and steering is not None:
                if self.report:
                    stack.callback(write_at_end, folder.directory)
                steering.begin()
                stack.callback(lambda: steering.end(folder.manifest.record.status))
                stack.enter_context(recording(folder))
                steering.restart()
            stack.enter_context(graceful_interrupts(interrupt))
            self.run(cast(Any, vessel), resume=start)
            if folder is not None and self._interrupted:
                folder.close("stopped", self._interrupted)

    def check(self, vessel: TrainingVesselBase[Any]) -> None:
        """Raise the ConfigError that `fit` would raise for this vessel before a run starts. Nothing is started."""
        if self._started_at is not None:
            raise ConfigError("this trainer is in the middle of a run; make another trainer for another fit")
        if self.max_iters is None and not self.callbacks:
            raise ConfigError(
                "max_iters is None and no callback could end the run; give max_iters, or a callback such as EarlyStopping"
            )
        env_kind(self.finite_env_type)
        vessel.require_stage("train")
        if self.validates:
            vessel.require_stage("val")
        given = isinstance(vessel, TrainingVessel) and vessel.val_initial_states is not None
        self.validates_at_end = given and self.uses_val_initial_states
        if self.validates_at_end and self.max_iters is None and not self.validates:
            raise ConfigError(
                "the vessel has val_initial_states, and nothing says when to use them; give the trainer val_every_n_iters, "
                "or max_iters for one validation at the end, or leave val_initial_states out"
            )
        vessel.require_policy_of_these_spaces()

    def _showing(self, vessel: TrainingVesselBase[Any], folder: FolderRecorder | None) -> AbstractContextManager[None]:
        if folder is not None:
            config = folder.manifest.record.config
        else:  # what the first line shows, without reading all data for their digest
            states: Any = getattr(vessel, "train_initial_states", None)
            options = {"episode_per_iter": getattr(vessel, "episode_per_iter", None)}
            config = {
                "algorithm": {"name": import_path(type(vessel.policy)), "options": options},
                "data": {"train": {"length": len(states) if hasattr(states, "__len__") else None}},
            }
        return showing(
            self,
            config,
            None if folder is None else folder.directory,
            unit="episodes",
            stopped=lambda: self._interrupted,
            pause=None if self._steering is None else self._steering.pause,
        )

    def _newest_checkpoint(self) -> Resumable | None:
        """Return the run's newest checkpoint, or None. Raise ConfigError if the folder `run_dir` holds no run."""
        assert self.run_dir is not None
        found = Checkpoint(self.run_dir / "checkpoints").latest()
        if found is None and not (self.run_dir / MANIFEST).exists():
            raise ConfigError(f"{self.run_dir} holds no run to resume: it has neither {MANIFEST} nor a checkpoint")
        return found

    def _record(self, vessel: TrainingVesselBase[Any], *, resume: bool) -> FolderRecorder | None:
        """Add the parts that record this fit, in place of those of the last one. Return the recorder, which is not open
        yet; None without `run_dir`.
        """
        if self._recorded is not None:
            self.writers.remove(self._recorded[0])
            for callback in self._recorded[1]:
                self.callbacks.remove(callback)
            self._recorded = self._steering = None
        if self.run_dir is None:
            return None
        continues = resume and (self.run_dir / MANIFEST).exists()  # earlier versions wrote none
        directory, manifest = begin_run(self.run_dir, resume=continues, kind="rl", config=self._run_config(vessel))
        steering = Steering(directory, SimulatorOptions(self, vessel), stop=self._stop_as_asked, is_async=False)
        looks = (steering.look, FitWatch(directory).look)
        folder, self._steering = FolderRecorder(directory, manifest, looks=looks), steering
        beginning, boundary = steering_callbacks(steering)
        self._recorded = FolderWriter(folder), [beginning, FolderCallback(folder), boundary]
        self.writers.insert(0, self._recorded[0])
        self.callbacks[:] = [beginning, self._recorded[1][1], *self.callbacks, boundary]
        self.callbacks.sort(key=lambda callback: callback.runs_last)
        return folder

    def _stop_as_asked(self) -> None:
        self._interrupted = None if self._steering is None else self._steering.stopped
        self.stop()

    def _run_config(self, vessel: TrainingVesselBase[Any]) -> dict[str, Any]:
        states: dict[str, Any] = {name: getattr(vessel, f"{name}_initial_states", None) for name in ("train", "val")}
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
            "code": describe_code(vessel),
            "model": None,
            "data": {  # a generator of states has no digest
                name: describe_dataset(found) if hasattr(found, "__len__") and hasattr(found, "__getitem__") else None
                for name, found in states.items()
            },
            "seed": getattr(vessel, "seed", None),
            "concurrency": self.concurrency,
            NOT_DEFAULT: {
                **changed_options(vessel, "vessel", without=_DATA),
                **changed_options(self, "trainer", without=_NO_SETTINGS),
            },
            **describe_program(),
        }

    def test(self, vessel: TrainingVesselBase[Any]) -> Mapping[str, MetricValue]:
        """Run every initial state of the test once. Return the metrics, by names without a prefix.

        The writers continue the record of this trainer's fit, if there was one. `metrics` then has the metrics of the
        test. A hook of a fit may call this method too; then `metrics` and `current_stage` are those of the fit again
        afterwards.
        Raise ConfigError if the vessel has no test.
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
            for writer in self.writers:  # so that opening them again continues their files
                writer.load_state_dict(writer.state_dict())
        self._drive(self._closing(self._recording(cast(Any, vessel), self._test(vessel))))
        return dict(self.metrics)

    def _test_within(self, vessel: TrainingVesselBase[Any]) -> Mapping[str, MetricValue]:
        """Run a test from a hook of a fit, whose writers are open, and put the fit's state back."""
        run = {
            name: getattr(self, name)
            for name in ("vessel", "metrics", "_set_by_loop", "current_stage", "last_row", "_venv")
        }
        try:
            self.metrics, self._set_by_loop, self._venv = {}, {}, None
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
        """Make this the trainer's vessel, with the state that was loaded for it, if any. Raise ConfigError if its
        policy does not fit its interpreters.
        """
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
        """Return environments of this trainer's vessel that run these initial states.

        The caller must close them, or use them in `with`. Raise ConfigError without a vessel.
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
        """Draw the seeds of the workers' generators, unless `env_options` has a seed. The draw changes NumPy's global
        state, so it comes before a checkpoint's states are restored.
        """
        if "seed" not in self.env_options and accepts(env_kind(self.finite_env_type), "seed"):
            self._worker_seeds = WorkerSeeds.draw()

    def _flow(self, vessel: Any, resume: Resumable | None) -> Flow:
        return self._closing(super()._flow(vessel, resume))

    def _closing(self, flow: Flow) -> Flow:
        """Run a flow, and close the environments at its end."""
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
        """Run one stage over its seeds. Return the metrics of its episodes and of the vessel, and the run's totals.

        make_seeds: returns the initial states.
        run: the vessel's method.
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
        # a test is no part of the run, and a row of totals alone says nothing
        if stage == "test" or not metrics:
            return metrics
        totals = {"total_episodes": self.current_episode, "total_steps": self.total_steps}
        if taken := sorted(totals.keys() & metrics.keys()):
            raise ConfigError(
                f"{source} has a metric named {taken[0]!r}, which the trainer writes itself; log it under another name"
            )
        return {**metrics, **totals}

    def _metrics_callback(self, on_episode: bool, on_collect: bool, log_buffer: LogBuffer) -> None:
        """Update `metrics` and the counters. The trainer's `LogBuffer` calls this method.

        on_episode: an episode has ended, so `metrics` gets its values.
        on_collect: a collect has ended, so `metrics` gets the means of its episodes.
        """
        metrics = log_buffer.episode_metrics() if on_episode else log_buffer.collect_metrics()
        if on_episode and self.current_stage == "train":
            self.current_episode += 1
            self.total_steps += int(metrics["steps_per_episode"])
        self._set_metrics(self.current_stage, metrics)

    # ---- state -----------------------------------------------------------------------------------

    def run_state(self) -> dict[str, Any]:
        return {**super().run_state(), "current_episode": self.current_episode, "total_steps": self.total_steps}

    def load_run_state(self, state: dict[str, Any]) -> None:
        super().load_run_state(state)
        self.current_episode, self.total_steps = state["current_episode"], state["total_steps"]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the run with the vessel's, for `load_state_dict`.

        The best weights that `EarlyStopping` keeps are in checkpoints only.
        """
        return {**self.run_state(), "vessel": {} if self.vessel is None else self.vessel.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state of `state_dict`, in this trainer or another one.

        The next `fit` without a checkpoint continues from it. A trainer that has no vessel yet restores the vessel's
        state when it gets one. `should_stop` is restored too, although a fit always begins with False.
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
        """Return the policy's state in a checkpoint, for `Policy.load_state_dict`.

        ckpt_path: a checkpoint's directory, a directory of checkpoints, or a `.pth` file.
        """
        return open_checkpoint(ckpt_path).vessel_state["policy"]


def _environment(
    simulator_fn: Any,
    state_interpreter: Any,
    action_interpreter: Any,
    reward: Any,
    aux_info: Any,
    min_loglevel: LogLevel,
) -> EnvWrapper[Any, Any, Any, Any, Any]:
    """Return one environment. Its interpreters and reward are copies, because each refers to its environment."""
    own: list[Any] = []
    for part in (state_interpreter, action_interpreter, reward, aux_info):
        try:
            own.append(copy.deepcopy(part))
        except Exception as error:
            raise ConfigError(
                f"each environment has a {type(part).__name__} of its own, and this one cannot be copied: {error}. Make what it holds "
                "when it is first used, or write its __deepcopy__"
            ) from error
    states, actions, rewards, infos = own
    return EnvWrapper(simulator_fn, states, actions, None, rewards, infos, LogCollector(min_loglevel))
