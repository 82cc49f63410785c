"""`Trainer`: trains a vessel by iterations of "collect, update, sometimes validate", on the loop that LLM agents are trained on.

The order of stages, hooks and counters is `leyden.loop.TrainLoop`'s. Here are the environments: they are made when the first stage needs
them, live as long as the fit, and are handed the seeds of each stage. It knows no algorithm: what a stage does is the vessel's.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from leyden.errors import CheckpointError, ConfigError
from leyden.loop import (
    Callback,
    LogCollector,
    LogLevel,
    LogWriter,
    MetricsRow,
    TrainLoop,
    graceful_interrupts,
    open_checkpoint,
)
from leyden.loop.metrics import Stage, clean_metrics
from leyden.loop.train_loop import Resumable, keyed
from leyden.rl.env import EnvWrapper, FiniteEnvType, FiniteVectorEnv, vectorize_env
from leyden.rl.env.processes import refuse_in_a_worker
from leyden.rl.env.randomness import WorkerSeeds
from leyden.rl.seed import SeedsLike
from leyden.rl.trainer.episodes import EpisodeMetrics
from leyden.rl.trainer.vessel import Seeds, TrainingVesselBase

__all__ = ["Trainer"]


class Trainer:
    """Trains vessels; each `fit` is one run.

    max_iters: iterations in all, those before a resume included; None: until a callback stops the run.
    val_every_n_iters: validate after every so many iterations; None: never.
    loggers: writers of metrics: of stages, episodes or steps, as each says.
    callbacks: called between the stages; what they are given as the trainer is the run's loop, which has the trainer's counters.
    finite_env_type: where the simulators run: "dummy" (here), "thread", "subproc", "shmem".
    concurrency: how many simulators at once.
    fast_dev_run: every stage runs on so many initial states only; to see that everything fits together.
    env_options: further options of `vectorize_env`.
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
    ) -> None:
        if max_iters is None and not callbacks:
            raise ConfigError(
                "max_iters is None and there is no callback that could end the run; give max_iters or EarlyStopping"
            )
        if fast_dev_run is not None and fast_dev_run < 1:
            raise ConfigError(f"fast_dev_run is {fast_dev_run}; it must be at least 1 initial state, or None for all")
        if concurrency < 1:
            raise ConfigError(f"concurrency is {concurrency}; it must be at least 1")
        self.max_iters = max_iters
        self.val_every_n_iters = val_every_n_iters
        self.loggers: list[LogWriter] = [loggers] if isinstance(loggers, LogWriter) else list(loggers or ())
        self.callbacks: list[Callback] = list(callbacks or ())
        self.finite_env_type: FiniteEnvType = finite_env_type
        self.concurrency = concurrency
        self.fast_dev_run = fast_dev_run
        self.env_options = dict(env_options or {})
        self.vessel: TrainingVesselBase[Any] | None = None
        self._worker_seeds: WorkerSeeds | None = None
        self.initialize()

    # ---- where the run is ----------------------------------------------------------------------------------------------

    def initialize(self) -> None:
        """Forget every run."""
        self._loop = _Loop(self, max_iters=0, callbacks=(), writers=())
        self.current_stage: Stage = "train"
        """The stage under way, or the last one."""
        self._test_metrics: dict[str, Any] = {}
        self.current_episode = 0
        self._recorded = False

    @property
    def current_iter(self) -> int:
        """Iterations that are done; during iteration k (from 0) it is k."""
        return self._loop.current_iter

    @property
    def metrics(self) -> Mapping[str, Any]:
        """The newest value of each metric; those of validations as `val/<name>`; after `test`, those of the test."""
        return self._test_metrics if self.current_stage == "test" else self._loop.metrics

    @property
    def should_stop(self) -> bool:
        """End after the stage under way."""
        return self._loop.should_stop

    @should_stop.setter
    def should_stop(self, stop: bool) -> None:
        self._loop.should_stop = stop

    # ---- runs ----------------------------------------------------------------------------------------------------------

    def fit(self, vessel: TrainingVesselBase[Any], ckpt_path: str | Path | Resumable | None = None) -> None:
        """Train `vessel`, from the beginning or from a checkpoint.

        ckpt_path: a checkpoint's directory, a directory of checkpoints (the newest intact one), a `.pth` file of `Checkpoint`, or what
            `Checkpoint.latest()` answered; None: from the beginning.
        The first Ctrl-C ends the run after the stage under way and keeps it. Raises CheckpointError for a checkpoint that is damaged or
        of another vessel; then nothing has begun.
        """
        refuse_in_a_worker()
        self._draw_worker_seeds()
        resume = open_checkpoint(ckpt_path) if isinstance(ckpt_path, str | Path) else ckpt_path
        self._assign(vessel)
        self.initialize()
        max_iters = sys.maxsize if self.max_iters is None else self.max_iters
        self._loop = _Loop(
            self,
            max_iters=max_iters,
            val_every_n_iters=self.val_every_n_iters,
            callbacks=self.callbacks,
            writers=self.loggers,
        )
        self._recorded = True
        with graceful_interrupts(self._loop.stop), _Environments(self, vessel) as environments:
            self._loop.run(_Stages(self, vessel, environments), resume=resume)

    def test(self, vessel: TrainingVesselBase[Any]) -> Mapping[str, Any]:
        """Run every initial state of the test once; the metrics are answered, and are in `metrics` without a prefix.

        The writers go on with what this trainer has written so far, if it has run.
        """
        refuse_in_a_worker()
        self._draw_worker_seeds()
        self._assign(vessel)
        self.current_stage = "test"
        recorded, self._recorded = self._recorded, True
        try:
            for writer in self.loggers:
                if recorded:
                    writer.load_state_dict(writer.state_dict())
                writer.open()
                writer.on_stage_start(self.current_iter, "test")
            self._tell("on_test_start", vessel)
            with _Environments(self, vessel) as environments:
                self._test_metrics = dict(environments.run("test", vessel.test_seed_iterator(), vessel.test))
            row = MetricsRow(self.current_iter, "test", self._loop.total_seconds, self._test_metrics)
            for writer in self.loggers:
                if writer.row_kind == "stage":
                    writer.write(row)
            self._tell("on_test_end", vessel)
        finally:
            for writer in self.loggers:
                writer.close()
        return self._test_metrics

    def progress(self, done: int, total: int, **counts: float) -> None:
        """For the vessel, as often as it likes: `done` of `total` episodes of this stage (0: nobody knows)."""
        self._loop.progress(done, total, **counts)

    def venv_from_iterator(self, iterator: SeedsLike, *extra: LogWriter) -> FiniteVectorEnv:
        """New environments of this trainer's vessel over these initial states. Close them, or use them in `with`.

        extra: writers beside the trainer's.
        """
        vessel = self.vessel
        if vessel is None:
            raise ConfigError(
                "the trainer has no vessel yet; call fit or test, or vessel.assign_trainer and set trainer.vessel"
            )
        writers = [*self.loggers, *extra]
        options: dict[str, Any] = {} if self._worker_seeds is None else {"seed": self._worker_seeds}
        return vectorize_env(
            partial(_environment, _Parts.of(vessel), self._min_loglevel()),
            self.finite_env_type,
            self.concurrency,
            writers,
            seeds=iterator,
            **options | self.env_options,
        )

    def _draw_worker_seeds(self) -> None:
        """Draw the seeds of the workers' generators before a checkpoint's random states are restored: these stay as they were saved."""
        if self.finite_env_type in ("subproc", "shmem") and "seed" not in self.env_options:
            self._worker_seeds = WorkerSeeds.draw()

    def _assign(self, vessel: TrainingVesselBase[Any]) -> None:
        self.vessel = vessel
        vessel.assign_trainer(self)

    def _tell(self, hook: str, vessel: TrainingVesselBase[Any]) -> None:
        for callback in self.callbacks:
            getattr(callback, hook)(self._loop, vessel)

    def _min_loglevel(self) -> LogLevel:
        """The lowest level that any writer keeps: nothing below it leaves an environment."""
        return min((writer.loglevel for writer in self.loggers), default=LogLevel.PERIODIC)

    # ---- state ---------------------------------------------------------------------------------------------------------

    def named_callbacks(self) -> dict[str, Callback]:
        """The callbacks by the names that their states have in a checkpoint."""
        return keyed(self.callbacks)

    def named_loggers(self) -> dict[str, LogWriter]:
        """The writers, likewise."""
        return keyed(self.loggers)

    def state_dict(self) -> dict[str, Any]:
        """Vessel, callbacks, loggers, counters, metrics and random states: all that a run goes on from."""
        return {
            **self._loop.state_dict(),
            "vessel": {} if self.vessel is None else self.vessel.state_dict(),
            "current_stage": self.current_stage,
            "should_stop": self.should_stop,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` answered. `should_stop` is not taken over: whether to go on is decided by who calls fit."""
        if self.vessel is not None:
            self.vessel.load_state_dict(state["vessel"])
        self._loop.load_state_dict(dict(state))

    @staticmethod
    def get_policy_state_dict(ckpt_path: str | Path) -> dict[str, Any]:
        """The policy's state in a checkpoint, for a policy that goes on elsewhere."""
        keeper = _Keeper()
        open_checkpoint(ckpt_path).restore(keeper)
        return keeper.state["policy"]


class _Keeper:
    """A vessel that only keeps the state that it is given."""

    state: Mapping[str, Any]

    def state_dict(self) -> Mapping[str, Any]:
        return self.state

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        self.state = state


class _Loop(TrainLoop):
    """The loop of one run; callbacks are given it as their trainer."""

    def __init__(self, trainer: Trainer, **options: Any) -> None:
        super().__init__(**options)
        self._trainer = weakref.proxy(trainer)  # which holds it

    @property
    def trainer(self) -> Trainer:
        """Whose run it is."""
        return self._trainer

    @property
    def vessel(self) -> TrainingVesselBase[Any] | None:
        """What is trained."""
        return self._trainer.vessel

    @property
    def current_episode(self) -> int:
        """Training episodes of this run so far."""
        return self._trainer.current_episode

    def state_dict(self) -> dict[str, Any]:
        """The loop's, and the episodes counted."""
        return {**super().state_dict(), "current_episode": self._trainer.current_episode}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from it."""
        super().load_state_dict(state)
        self._trainer.current_episode = state.get("current_episode", 0)


class _Stages:
    """A `TrainingVesselBase` as the loop's vessel."""

    def __init__(self, trainer: Trainer, vessel: TrainingVesselBase[Any], environments: _Environments) -> None:
        self._trainer = trainer
        self._vessel = vessel
        self._environments = environments

    def step(self, iteration: int, /) -> Mapping[str, Any]:
        return self._environments.run("train", self._vessel.train_seed_iterator(), self._vessel.train)

    def validate(self, iteration: int, /) -> Mapping[str, Any]:
        return self._environments.run("val", self._vessel.val_seed_iterator(), self._vessel.validate)

    def state_dict(self) -> dict[str, Any]:
        return self._vessel.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        try:
            self._vessel.load_state_dict(state)
        except CheckpointError:
            raise
        except (
            KeyError,
            TypeError,
            ValueError,
            RuntimeError,
        ) as error:  # torch says what does not fit as a RuntimeError
            raise CheckpointError(
                f"the checkpoint is not of this {type(self._vessel).__name__} and its policy: {type(error).__name__}: {error}"
            ) from error


class _Environments:
    """The environments of one run: made for its first stage, used for all, closed at its end."""

    def __init__(self, trainer: Trainer, vessel: TrainingVesselBase[Any]) -> None:
        self._trainer = trainer
        self._vessel = vessel
        self._episodes = EpisodeMetrics()
        self._venv: FiniteVectorEnv | None = None

    def __enter__(self) -> _Environments:
        return self

    def __exit__(self, *_: object) -> None:
        if self._venv is not None:
            self._venv.close()

    def run(
        self, stage: Stage, seeds: Seeds, collect: Callable[[FiniteVectorEnv], Mapping[str, Any] | None]
    ) -> Mapping[str, Any]:
        """One stage: what the episodes say, and what the vessel answers."""
        trainer = self._trainer
        trainer.current_stage = stage
        self._episodes.clear()
        with _entered(seeds) as iterator:
            if self._venv is None:
                self._venv = trainer.venv_from_iterator(iterator, self._episodes)
            else:
                self._venv.use_seeds(iterator)
            answered = collect(self._venv)
        if stage == "train":
            trainer.current_episode += self._episodes.count
        return {**self._episodes.metrics(), **clean_metrics(answered, source=f"{type(self._vessel).__name__}.{stage}")}


def _entered(seeds: Seeds) -> AbstractContextManager[SeedsLike]:
    if isinstance(seeds, AbstractContextManager):
        return seeds
    return nullcontext(seeds)


@dataclass(frozen=True)
class _Parts:
    """What an environment is made of."""

    simulator_fn: Any
    state_interpreter: Any
    action_interpreter: Any
    reward: Any
    aux_info_collector: Any

    @classmethod
    def of(cls, vessel: TrainingVesselBase[Any]) -> _Parts:
        return cls(
            vessel.simulator_fn,
            vessel.state_interpreter,
            vessel.action_interpreter,
            vessel.reward,
            vessel.aux_info_collector,
        )


def _environment(parts: _Parts, min_loglevel: LogLevel) -> EnvWrapper[Any, Any, Any, Any, Any]:
    """One environment, with interpreters and a reward of its own: they know the environment that they are in."""
    own = map(_copy, (parts.state_interpreter, parts.action_interpreter, parts.reward, parts.aux_info_collector))
    state_interpreter, action_interpreter, reward, aux_info_collector = own
    return EnvWrapper(
        parts.simulator_fn,
        state_interpreter,
        action_interpreter,
        None,
        reward,
        aux_info_collector,
        LogCollector(min_loglevel),
    )


def _copy(part: Any) -> Any:
    try:
        return copy.deepcopy(part)
    except Exception as error:
        raise ConfigError(
            f"each environment has a {type(part).__name__} of its own, and this one cannot be copied: {error}. Make what it holds "
            "when it is first used, or write its __deepcopy__"
        ) from error
