"""Order execution: trade an amount of one asset within a given time, at a better price than its average.

Lives here: a simulator on historical bars (`SingleAssetOrderExecutionSimple`), interpreters, rewards, a recurrent
network, readers of bars and orders, and runs from configuration files. The trainer and the policies are those of
`leyden.rl`, which knows nothing of this package. Only `Recurrent` needs torch, which is imported when the name is first
used. To add a component, subclass the class of its kind, and name your class and its `module_path` in a configuration
file.
"""

from typing import TYPE_CHECKING

from leyden._lib.extras import lazy_package

if TYPE_CHECKING:
    from leyden_compat.order_execution.bars import Bars as Bars
    from leyden_compat.order_execution.bars import IntradayBacktestData as IntradayBacktestData
    from leyden_compat.order_execution.bars import load_bars as load_bars
    from leyden_compat.order_execution.data import BarsProcessedDataProvider as BarsProcessedDataProvider
    from leyden_compat.order_execution.data import IntradayProcessedData as IntradayProcessedData
    from leyden_compat.order_execution.data import ProcessedDataProvider as ProcessedDataProvider
    from leyden_compat.order_execution.data import load_orders as load_orders
    from leyden_compat.order_execution.interpreter import CategoricalActionInterpreter as CategoricalActionInterpreter
    from leyden_compat.order_execution.interpreter import CurrentStepStateInterpreter as CurrentStepStateInterpreter
    from leyden_compat.order_execution.interpreter import DummyStateInterpreter as DummyStateInterpreter
    from leyden_compat.order_execution.interpreter import FullHistoryStateInterpreter as FullHistoryStateInterpreter
    from leyden_compat.order_execution.interpreter import TwapRelativeActionInterpreter as TwapRelativeActionInterpreter
    from leyden_compat.order_execution.network import Recurrent as Recurrent
    from leyden_compat.order_execution.objects import Order as Order
    from leyden_compat.order_execution.objects import OrderDir as OrderDir
    from leyden_compat.order_execution.reward import PAPenaltyReward as PAPenaltyReward
    from leyden_compat.order_execution.reward import PPOReward as PPOReward
    from leyden_compat.order_execution.simulator import (
        SingleAssetOrderExecutionSimple as SingleAssetOrderExecutionSimple,
    )
    from leyden_compat.order_execution.simulator import price_advantage as price_advantage
    from leyden_compat.order_execution.state import History as History
    from leyden_compat.order_execution.state import SAOEMetrics as SAOEMetrics
    from leyden_compat.order_execution.state import SAOEState as SAOEState
else:
    __getattr__, __dir__, __all__ = lazy_package(__name__, extra="rl")
