"""`Recurrent`: a network over the whole history of `FullHistoryStateInterpreter`. It needs torch.

Shapes: N observations, T ticks, S steps, C features, H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from gymnasium import spaces
from torch import Tensor, nn

from leyden.errors import ConfigError

_CELLS: dict[str, Any] = {"rnn": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}


class Recurrent(nn.Module):
    """Two recurrent networks, over the market's ticks so far and over the positions so far.

    Their outputs and the order's direction are combined to features (N, output_dim), from which a policy computes
    actions and values. The network is that of "Universal Trading for Order Execution with Oracle Policy Distillation"
    (AAAI 2021), without its oracle and with both directions.

    obs_space: the space of `FullHistoryStateInterpreter`.
    hidden_dim: the width of all hidden layers.
    output_dim: the width of the output.
    """

    def __init__(
        self,
        obs_space: spaces.Dict,
        hidden_dim: int = 64,
        output_dim: int = 32,
        rnn_type: Literal["rnn", "lstm", "gru"] = "gru",
        rnn_num_layers: int = 1,
    ) -> None:
        super().__init__()
        needed = {"data_processed", "position_history", "cur_step", "cur_tick", "num_step", "target", "acquiring"}
        if missing := needed - set(getattr(obs_space, "spaces", {})):
            raise ConfigError(
                f"Recurrent needs {', '.join(sorted(missing))} in the observation; use FullHistoryStateInterpreter"
            )
        if rnn_type not in _CELLS:
            raise ConfigError(f"rnn_type is {rnn_type!r}; choose one of {', '.join(_CELLS)}")
        self.hidden_dim, self.output_dim = hidden_dim, output_dim
        data_shape = obs_space["data_processed"].shape
        assert data_shape is not None
        cell = _CELLS[rnn_type]
        self.raw_rnn = cell(hidden_dim, hidden_dim, batch_first=True, num_layers=rnn_num_layers)
        self.pri_rnn = cell(hidden_dim, hidden_dim, batch_first=True, num_layers=rnn_num_layers)
        self.raw_fc = nn.Sequential(nn.Linear(data_shape[-1], hidden_dim), nn.ReLU())
        self.pri_fc = nn.Sequential(nn.Linear(2, hidden_dim), nn.ReLU())
        self.dire_fc = nn.Sequential(nn.Linear(2, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, hidden_dim), nn.ReLU())
        self.fc = nn.Sequential(
            nn.Linear(3 * hidden_dim, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, output_dim), nn.ReLU()
        )

    def forward(self, obs: Mapping[str, Tensor]) -> Tensor:
        """Return features, (N, output_dim).

        Ticks and steps after the current ones do not change them.
        """
        features_NTC = obs["data_processed"].float()
        rows = torch.arange(len(features_NTC), device=features_NTC.device)
        # with a row of zeros in front, the output at `cur_tick` has seen the ticks before it alone
        features_NTC = torch.cat((torch.zeros_like(features_NTC[:, :1]), features_NTC), 1)
        market_NTH = self.raw_rnn(self.raw_fc(features_NTC))[0]
        position_NS = obs["position_history"].float() / obs["target"].float().unsqueeze(-1)
        step_S = torch.arange(position_NS.shape[1], device=position_NS.device).float()
        step_NS = step_S / obs["num_step"].float().unsqueeze(-1)
        private_NSH = self.pri_rnn(self.pri_fc(torch.stack((position_NS, step_NS), -1)))[0]
        buys_N = obs["acquiring"].float()
        sources = (
            market_NTH[rows, obs["cur_tick"].long()],
            private_NSH[rows, obs["cur_step"].long()],
            self.dire_fc(torch.stack((buys_N, 1 - buys_N), -1)),
        )
        return self.fc(torch.cat(sources, -1))
