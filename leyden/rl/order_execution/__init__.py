"""Order execution: trade an amount of one asset within some time, at a better price than its average.

Lives here: a simulator on bars of the past (`SingleAssetOrderExecutionSimple`), what a policy sees and may do (interpreters), what that is
worth (rewards), a recurrent network, where bars and orders come from, and runs from configuration files. The trainer and the policies are
`leyden.rl`'s, which knows nothing of this package. Only `Recurrent` needs torch, and it is loaded when it is named.
To add a component, subclass the class of its kind, and name yours in a configuration by its `module_path`.
"""

from typing import TYPE_CHECKING, Any

from leyden.extras import missing_extra

try:
    from leyden.rl.order_execution.bars import Bars, IntradayBacktestData, load_bars
    from leyden.rl.order_execution.data import (
        BarsProcessedDataProvider,
        IntradayProcessedData,
        ProcessedDataProvider,
        load_orders,
    )
    from leyden.rl.order_execution.interpreter import (
        CategoricalActionInterpreter,
        CurrentStepStateInterpreter,
        DummyStateInterpreter,
        FullHistoryStateInterpreter,
        TwapRelativeActionInterpreter,
    )
    from leyden.rl.order_execution.objects import Order, OrderDir
    from leyden.rl.order_execution.reward import PAPenaltyReward, PPOReward
    from leyden.rl.order_execution.simulator import SingleAssetOrderExecutionSimple, price_advantage
    from leyden.rl.order_execution.state import History, SAOEMetrics, SAOEState
except ImportError as error:
    raise missing_extra(error, extra="rl", needed_by=__name__) from None

if TYPE_CHECKING:
    from leyden.rl.order_execution.network import Recurrent

__all__ = [
    "Bars",
    "BarsProcessedDataProvider",
    "CategoricalActionInterpreter",
    "CurrentStepStateInterpreter",
    "DummyStateInterpreter",
    "FullHistoryStateInterpreter",
    "History",
    "IntradayBacktestData",
    "IntradayProcessedData",
    "Order",
    "OrderDir",
    "PAPenaltyReward",
    "PPOReward",
    "ProcessedDataProvider",
    "Recurrent",
    "SAOEMetrics",
    "SAOEState",
    "SingleAssetOrderExecutionSimple",
    "TwapRelativeActionInterpreter",
    "load_bars",
    "load_orders",
    "price_advantage",
]


def __getattr__(name: str) -> Any:
    if name == "Recurrent":
        from leyden.rl.order_execution.network import Recurrent

        return Recurrent
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
