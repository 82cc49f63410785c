"""Tables of pandas and Arrow are refused as data sets, and missing values in their rows are named."""

from typing import Any

import pytest

import leyden as ly
from leyden.errors import ConfigError

pytestmark = pytest.mark.rl_data


@ly.rollout
async def agent(task: Any) -> float:
    return 1.0


def fit(dataset: Any) -> None:
    ly.Trainer(algorithm="baseline", store="memory").fit(agent, dataset)


def test_a_table_is_refused_with_the_call_that_makes_a_list_of_it() -> None:
    import pandas as pd
    import pyarrow as pa

    rows = [{"q": "a", "n": 1}, {"q": "b", "n": 2}]
    for table, call in (
        (pd.DataFrame(rows), r'pandas DataFrame; give a list of tasks: .to_dict\("records"\)'),
        (pd.DataFrame(rows, index=[5, 6]), r'.to_dict\("records"\)'),
        (pd.DataFrame([["a", 1]]), r'.to_dict\("records"\)'),
        (pd.Series(["a"]), r"pandas Series; give a list of tasks: .tolist\(\)"),
        (pd.Index([1]), r"\(\)"),
        (pa.Table.from_pylist(rows), r"pyarrow Table; give a list of tasks: .to_pylist\(\)"),
        (pa.array([1, 2]), r".to_pylist\(\)"),
    ):
        with pytest.raises(ConfigError, match=call):
            fit(table)
    fit(pd.DataFrame(rows).to_dict("records"))


def test_a_missing_value_of_a_row_is_named() -> None:
    import pandas as pd

    for value in (pd.NaT, pd.NA, float("nan")):
        with pytest.raises(
            ConfigError, match=r"task 0 of train_dataset, field t is .*leave the field out, or give None"
        ):
            fit([{"t": value}])
    with pytest.raises(ConfigError, match=r"field t is Timestamp.*isoformat\(\)"):
        fit([{"t": pd.Timestamp("2026-01-02")}])
