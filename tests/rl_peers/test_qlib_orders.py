"""Programs of Qlib's order execution, which need pandas, torch and pickled tables."""

from __future__ import annotations

import datetime
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from leyden.errors import ConfigError
from leyden_compat.order_execution import SAOEState
from leyden_compat.qlib import orders
from leyden_compat.qlib.tables import read_pickle

PROGRAMS = Path(__file__).parents[1] / "compat" / "qlib_programs"


def output_of(program: str, *arguments: object) -> str:
    """Run a program under the alias, and return what it prints."""
    command = [sys.executable, "-m", "leyden.compat", str(PROGRAMS / program), *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, text=True, capture_output=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("kind", ["dummy", "subproc"])
def test_a_program_with_pickled_tables_simulates_backtests_and_trains(tmp_path: Path, kind: str) -> None:
    assert f"done {kind}" in output_of("orders.py", tmp_path, kind)


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_tables_of_many_kinds_are_read_as_pandas_reads_them(tmp_path: Path, protocol: int) -> None:
    times = pd.date_range("2013-12-11 09:30", periods=3, freq="min")
    index = pd.MultiIndex.from_product(
        [["AAL"], times, [times[0].normalize()]], names=["instrument", "datetime", "date"]
    )
    columns = {
        "text": ["a", "b", "c"],
        "kind": pd.Categorical(["x", "y", "x"]),
        "when": times,
        "utc": times.tz_localize("UTC"),
        "count": pd.array([1, None, 3], dtype="Int64"),
        "object": np.array([pd.Timestamp("2020-01-01"), datetime.date(2020, 1, 1), None], object),
    }
    for number, table in enumerate([pd.DataFrame({"$close0": np.arange(3.0)}, index), pd.DataFrame(columns)]):
        path = tmp_path / f"{number}.pkl"
        table.to_pickle(path, protocol=protocol)
        pd.testing.assert_frame_equal(read_pickle(path), table)


class Malicious:
    """Calls `os.system` when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch executed",)


def test_a_table_that_would_execute_code_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pd.DataFrame({"a": np.array([Malicious()], object)}).to_pickle("bad.pkl")
    with pytest.raises(ConfigError, match=r"calls posix\.system"):
        read_pickle(Path("bad.pkl"))
    assert not Path("executed").exists()
    Path("list.pkl").write_bytes(pickle.dumps([1]))
    with pytest.raises(ConfigError, match="holds a list"):
        read_pickle(Path("list.pkl"))
    Path("damaged.pkl").write_bytes(b"\x80\x04x")
    with pytest.raises(ConfigError, match="no pickled table that can be read"):
        read_pickle(Path("damaged.pkl"))


def test_a_state_with_tables_of_pandas_is_read_as_the_same_state_of_leyden(tmp_path: Path) -> None:
    day = pd.Timestamp("2013-12-11")
    times = pd.date_range(day + pd.Timedelta("9h30m"), periods=390, freq="min")
    index = pd.MultiIndex.from_product([["AAL"], times, [day]], names=["instrument", "datetime", "date"])
    prices = 25 + np.random.default_rng(0).normal(size=390)
    (tmp_path / "backtest").mkdir()
    pd.DataFrame({"$close0": prices, "$volume0": np.full(390, 1000.0)}, index).to_pickle(tmp_path / "backtest/AAL.pkl")
    order = orders.Order("AAL", 30.0, orders.Order.SELL, day, day + pd.Timedelta("23h59m"))
    simulator = orders.SingleAssetOrderExecutionSimple(order, tmp_path)
    observed = orders.CurrentStepStateInterpreter(max_step=13)
    relative = orders.TwapRelativeActionInterpreter()
    for amount in (6.0, 3.0, 0.0):
        simulator.step(amount)
        state = simulator.get_state()
        of_qlib = SAOEState(**{name: getattr(state, name) for name in SAOEState._fields})
        assert isinstance(of_qlib.history_exec, pd.DataFrame)
        assert observed.interpret(of_qlib) == observed.interpret(state)
        assert relative.interpret(of_qlib, 1.0) == relative.interpret(state, 1.0)
        assert orders.PAPenaltyReward().reward(of_qlib) == pytest.approx(orders.PAPenaltyReward().reward(state))
    assert orders.PAPenaltyReward(penalty=0).reward(of_qlib) == 0  # nothing was traded in the last step


def test_qlibs_nested_executors_run_below_the_alias(tmp_path: Path) -> None:
    assert output_of("nested.py", tmp_path).splitlines()[-1] == "done"
