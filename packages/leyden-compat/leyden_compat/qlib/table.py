"""Leyden's replacement for each public name of `qlib.rl` in pyqlib 0.9.7, and for the few names around it that its
programs import from `qlib`.

A test compares the table with `tests/compat/qlib.json`, an inventory of the wheel, so that no name is missing. If
pyqlib is installed, everything outside `qlib.rl` is pyqlib's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from leyden_compat.finder import ForeignModule, MissingName

Names = dict[str, str | MissingName]
_HERE = "leyden_compat.qlib"


def _same(module: str, names: str) -> Names:
    return {name: f"{module}:{name}" for name in names.split()}


def _missing(instead: str, names: str) -> Names:
    """Return a table of names whose use raises an error with the same text."""
    return dict.fromkeys(names.split(), MissingName(f"{instead}."))


_NESTED = (
    "Qlib's nested executors are used from an installed pyqlib, so run `pip install pyqlib`; without it, use "
    "SingleAssetOrderExecutionSimple, or pass your own Simulator"
)
_WRITERS = "Qlib's class writes nothing; use leyden.training."

_MODULES: dict[str, Names] = {
    "rl.seed": {"InitialStateType": "leyden.rl.parts:InitialStateType"},
    "rl.simulator": _same(f"{_HERE}.parts", "StateType ActType Simulator"),
    "rl.interpreter": _same(f"{_HERE}.parts", "ObsType PolicyActType Interpreter StateInterpreter ActionInterpreter")
    | {"GymSpaceValidationError": "leyden.rl.spaces:GymSpaceValidationError"},
    "rl.reward": _same(f"{_HERE}.parts", "SimulatorState Reward RewardCombination"),
    "rl.aux_info": _same(f"{_HERE}.parts", "AuxInfoType AuxiliaryInfoCollector"),
    "rl.utils.data_queue": _same("leyden.rl", "DataQueue"),
    "rl.utils.env_wrapper": _same(f"{_HERE}.environment", "EnvWrapper SEED_INTERATOR_MISSING")
    | _same("leyden.rl.env", "EnvWrapperStatus InfoDict"),
    "rl.utils.finite_env": _same(
        f"{_HERE}.vector",
        "FiniteEnvType FiniteVectorEnv FiniteDummyVectorEnv FiniteSubprocVectorEnv FiniteShmemVectorEnv vectorize_env",
    )
    | _same(f"{_HERE}.spaces", "fill_invalid is_invalid generate_nan_observation check_nan_observation")
    | _same(f"{_HERE}.log", "LogWriter"),
    "rl.utils.log": _same("leyden.training", "LogLevel")
    | _same(f"{_HERE}.log", "LogCollector LogWriter LogBuffer ConsoleWriter CsvWriter")
    | _same("leyden.rl.parts", "ObsType ActType")
    | {
        "PickleWriter": MissingName(_WRITERS + "PickleWriter(path)."),
        "TensorboardWriter": MissingName(_WRITERS + "TensorboardWriter(directory)."),
        "MlflowWriter": MissingName(_WRITERS + "MlflowWriter(experiment)."),
    },
    "rl.trainer.trainer": _same(f"{_HERE}.trainer", "Trainer"),
    "rl.trainer.vessel": _same(f"{_HERE}.trainer", "TrainingVessel TrainingVesselBase")
    | _same("leyden.rl.trainer", "SeedIteratorNotAvailable"),
    "rl.trainer.callbacks": _same(f"{_HERE}.callbacks", "Checkpoint EarlyStopping")
    | _same("leyden.training", "Callback MetricsWriter"),
    "rl.trainer.api": _same(f"{_HERE}.trainer", "train backtest"),
    "rl.order_execution.interpreter": _same(
        f"{_HERE}.orders",
        "DummyStateInterpreter FullHistoryStateInterpreter CurrentStepStateInterpreter CategoricalActionInterpreter "
        "TwapRelativeActionInterpreter",
    )
    | _missing(
        "observations are dicts of arrays; the interpreter's `observation_space` says of which",
        "FullHistoryObs CurrentStateObs",
    )
    | _missing("cast with numpy: `np.asarray(value, np.float32)`", "canonicalize"),
    "rl.order_execution.network": _same("leyden_compat.order_execution", "Recurrent")
    | _missing("no policy of Qlib uses it; write a torch module of your own", "Attention"),
    "rl.order_execution.policy": _same(
        f"{_HERE}.policy", "NonLearnablePolicy AllOne PPO DQN auto_device set_weight chain_dedup"
    )
    | _missing("PPO makes actor and critic from `network`; read them at `policy.module`", "PPOActor PPOCritic")
    | _missing("DQN makes its model from `network`; read it at `policy.module`", "DQNModel"),
    "rl.order_execution.reward": _same(f"{_HERE}.orders", "PAPenaltyReward PPOReward"),
    "rl.order_execution.simulator_simple": _same(f"{_HERE}.orders", "SingleAssetOrderExecutionSimple")
    | _same("leyden_compat.order_execution", "price_advantage"),
    "rl.order_execution.state": _same("leyden_compat.order_execution", "SAOEMetrics SAOEState"),
    "rl.order_execution.simulator_qlib": _missing(_NESTED, "SingleAssetOrderExecution"),
    "rl.order_execution.strategy": _missing(
        _NESTED, "SAOEStateAdapter SAOEStrategy ProxySAOEStrategy SAOEIntStrategy fill_missing_data"
    ),
    "rl.order_execution.utils": _same("leyden_compat.order_execution", "price_advantage")
    | _missing("use pandas.concat([frame, other])", "dataframe_append")
    | _missing(_NESTED, "get_simulator_executor"),
    "rl.strategy.single_order": _missing(_NESTED, "SingleOrderStrategy"),
    "rl.data.base": _same(
        f"{_HERE}.orders", "ProcessedDataProvider BaseIntradayBacktestData BaseIntradayProcessedData"
    ),
    "rl.data.pickle_styled": _same(
        f"{_HERE}.orders",
        "DealPriceType SimpleIntradayBacktestData load_simple_intraday_backtest_data PickleIntradayProcessedData "
        "load_pickle_intraday_processed_data PickleProcessedDataProvider load_orders",
    ),
    "rl.data.native": _missing(
        "Qlib's data server is not read; export the bars as CSV or Parquet, and use leyden_compat.order_execution.load_bars "
        "and BarsProcessedDataProvider",
        "get_ticks_slice IntradayBacktestData load_backtest_data",
    )
    | _same(
        f"{_HERE}.orders",
        "DataframeIntradayBacktestData HandlerIntradayProcessedData load_handler_intraday_processed_data "
        "HandlerProcessedDataProvider",
    ),
    "rl.data.integration": _missing("Leyden needs no set-up; leave the call out", "init_qlib"),
    "rl.contrib.train_onpolicy": _same(f"{_HERE}.experiments", "seed_everything LazyLoadDataset train_and_test main"),
    "rl.contrib.train_onpolicy.__main__": {"main": f"{_HERE}.experiments:run_command"},
    "rl.contrib.backtest": _missing(
        "Qlib's backtest is used from an installed pyqlib, so run `pip install pyqlib`; without it, run "
        "`leyden rl backtest CONFIG`, or call leyden_compat.order_execution.run.backtest_orders",
        "single_with_simulator single_with_collect_data_loop backtest main",
    ),
    "rl.contrib.naive_config_parser": _missing(
        "call leyden_compat.order_execution.config.read_config, which knows `_base_` and `_delete_`",
        "DELETE_KEY merge_a_into_b check_file_exist parse_backtest_config get_backtest_config_fromfile",
    ),
    "rl.contrib.utils": _missing(
        "call qlib.rl.data.pickle_styled.load_orders, which reads the file of orders", "read_order_file"
    ),
}

_PACKAGES: dict[str, tuple[str, ...]] = {
    "rl": ("rl.interpreter", "rl.reward", "rl.simulator"),
    "rl.utils": ("rl.utils.data_queue", "rl.utils.env_wrapper", "rl.utils.finite_env", "rl.utils.log"),
    "rl.trainer": ("rl.trainer.api", "rl.trainer.callbacks", "rl.trainer.trainer", "rl.trainer.vessel"),
    "rl.order_execution": (
        "rl.order_execution.interpreter",
        "rl.order_execution.network",
        "rl.order_execution.policy",
        "rl.order_execution.reward",
        "rl.order_execution.simulator_simple",
        "rl.order_execution.state",
        "rl.order_execution.strategy",
    ),
    "rl.strategy": ("rl.strategy.single_order",),
    "rl.data": (),
    "rl.contrib": (),
}
"""Packages of Qlib, and the modules whose names they repeat."""

_AROUND: dict[str, Names] = {
    "": {},
    "backtest": _same(f"{_HERE}.orders", "Order OrderDir"),
    "backtest.decision": _same(f"{_HERE}.orders", "Order OrderDir"),
    "config": {"C": f"{_HERE}.around:CONFIG"},
    "constant": _same(f"{_HERE}.around", "INF EPS ONE_DAY ONE_MIN"),
    "log": _same(f"{_HERE}.around", "set_log_with_config") | {"get_module_logger": f"{_HERE}.log:module_logger"},
    "utils": _same(f"{_HERE}.configuration", "init_instance_by_config"),
    "typehint": _same("typing", "Literal TypedDict Protocol final"),
}
"""Names that programs for `qlib.rl` import from elsewhere in Qlib. An installed pyqlib takes precedence."""


_OF_PYQLIB = {
    "rl.contrib.backtest",
    "rl.contrib.naive_config_parser",
    "rl.contrib.utils",
    "rl.data.integration",
    "rl.data.native",
    "rl.order_execution.simulator_qlib",
    "rl.order_execution.strategy",
    "rl.order_execution.utils",
    "rl.strategy.single_order",
}
"""Modules that drive Qlib's backtest and read its data. If pyqlib is installed, they are pyqlib's; what they import
from `qlib.rl` is Leyden's."""


def _modules() -> Mapping[str, ForeignModule]:
    """Return the table of Qlib's modules: those of `qlib.rl`, its packages that repeat the names of several modules,
    and the modules outside `qlib.rl` that its programs import.
    """
    modules = {
        f"qlib.{name}": ForeignModule(names, only_if_missing=name in _OF_PYQLIB) for name, names in _MODULES.items()
    }
    for package, parts in _PACKAGES.items():
        joined: Names = {}
        for part in parts:
            joined |= {name: _from_pyqlib(target, part) for name, target in _MODULES[part].items()}
        modules[f"qlib.{package}"] = ForeignModule(joined)
    for name, names in _AROUND.items():
        modules[f"qlib.{name}".rstrip(".")] = ForeignModule(names, only_if_missing=True)
    return MappingProxyType(modules)


def _from_pyqlib(target: str | MissingName, part: str) -> str | MissingName:
    """Return a package's entry for a name of its module `part`. A name that Leyden lacks is taken from an installed
    pyqlib if the module is.
    """
    return replace(target, module=f"qlib.{part}") if isinstance(target, MissingName) and part in _OF_PYQLIB else target


MODULES = _modules()

_STRATEGY = "qlib.rl.order_execution.strategy"
TIANSHOU: Mapping[str, ForeignModule] = MappingProxyType(
    {
        name: ForeignModule(names, only_if_missing=True, only_for=_STRATEGY)
        for name, names in {
            "tianshou": {},
            "tianshou.data": {"Batch": f"{_HERE}.policy:Batch"},
            "tianshou.policy": {"BasePolicy": f"{_HERE}.policy:CallablePolicy"},
        }.items()
    }
)
"""Names that Qlib's own strategies import from tianshou 0.4.

pyqlib does not require tianshou, and tianshou 2 has no `tianshou.policy`.
"""
