"""Read pickled tables of pandas without executing code from them.

A pickle can name any function to call. `read_pickle` allows the constructors of tables in pandas and NumPy, and refuses
a file that names anything else. Of Qlib's own objects, such as a `DatasetH`, it reads the attributes without running
their code, so that Qlib need not be installed.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Final

from leyden.errors import ConfigError

_PARTS: Final[dict[str, str]] = {
    "builtins": "bytearray slice",
    "__builtin__": "bytearray slice",
    "_codecs": "encode",
    "datetime": "date datetime time timedelta timezone",
    "pytz": "_UTC _p",
    "zoneinfo": "ZoneInfo._unpickle",
    "numpy": "dtype ndarray",
    "numpy.core.multiarray": "_reconstruct scalar",
    "numpy._core.multiarray": "_reconstruct scalar",
    "numpy.core.numeric": "_frombuffer",
    "numpy._core.numeric": "_frombuffer",
    "pandas": "BooleanDtype Categorical CategoricalDtype CategoricalIndex DataFrame DatetimeIndex DatetimeTZDtype "
    "Float32Dtype Float64Dtype Index Int32Dtype Int64Dtype MultiIndex RangeIndex Series StringDtype TimedeltaIndex "
    "Timestamp",
    "pandas._libs.arrays": "__pyx_unpickle_NDArrayBacked",
    "pandas._libs.internals": "BlockPlacement _unpickle_block",
    "pandas._libs.missing": "NAType",
    "pandas._libs.tslib": "Timestamp __nat_unpickle",
    "pandas._libs.tslibs.nattype": "__nat_unpickle _nat_unpickle",
    "pandas._libs.tslibs.offsets": "BusinessDay Day Hour Minute Second",
    "pandas._libs.tslibs.timedeltas": "Timedelta _timedelta_unpickle",
    "pandas._libs.tslibs.timestamps": "Timestamp _unpickle_timestamp",
    "pandas.arrays": "ArrowStringArray BooleanArray DatetimeArray FloatingArray IntegerArray StringArray TimedeltaArray",
    "pandas.core.arrays.categorical": "Categorical",
    "pandas.core.arrays.datetimes": "DatetimeArray",
    "pandas.core.arrays.floating": "Float32Dtype Float64Dtype FloatingArray",
    "pandas.core.arrays.integer": "Int32Dtype Int64Dtype IntegerArray",
    "pandas.core.arrays.boolean": "BooleanArray BooleanDtype",
    "pandas.core.arrays.string_": "StringArray StringDtype StringDtype.construct_from_string",
    "pandas.core.arrays.timedeltas": "TimedeltaArray",
    "pandas.core.dtypes.dtypes": "CategoricalDtype DatetimeTZDtype",
    "pandas.core.base": "FrozenList FrozenNDArray",
    "pandas.core.frame": "DataFrame",
    "pandas.core.indexes.base": "Index _new_Index",
    "pandas.core.indexes.category": "CategoricalIndex",
    "pandas.core.indexes.datetimes": "DatetimeIndex _new_DatetimeIndex",
    "pandas.core.indexes.frozen": "FrozenList FrozenNDArray",
    "pandas.core.indexes.multi": "MultiIndex",
    "pandas.core.indexes.numeric": "Float64Index Int64Index UInt64Index",
    "pandas.core.indexes.range": "RangeIndex",
    "pandas.core.indexes.timedeltas": "TimedeltaIndex",
    "pandas.core.internals.blocks": "new_block",
    "pandas.core.internals.managers": "BlockManager SingleBlockManager",
    "pandas.core.series": "Series",
    "pyarrow.lib": "_restore_array py_buffer type_for_alias",
}
"""The names that a table's pickle may use, by module, in pandas 1.0 to 3.1."""


class _Attributes:
    """Stands for an object of Qlib's: it has the attributes, and no code of its class."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Drop the arguments that the class itself would take."""


def pandas() -> Any:
    """Return the module pandas, which programs of this kind use themselves."""
    return importlib.import_module("pandas")


def read_pickle(path: Path) -> Any:
    """Return the data frame or series in a pickle. Of a pickled data set of Qlib, return the table of its handler.

    Raise FileNotFoundError, and ConfigError for a file that would execute code or holds no table.
    """
    frames = pandas()
    compat: Any = importlib.import_module("pandas.compat.pickle_compat")

    class Reader(compat.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if module.partition(".")[0] == "qlib":
                return _Attributes
            if name not in _PARTS.get(module, "").split():
                raise ConfigError(
                    f"{path} would execute code when it is read: it calls {module}.{name}, which is no part of a table. "
                    "It was not read. If you trust the file, read it where it was written, and write the table anew"
                )
            return super().find_class(module, name)  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType] -- pandas is untyped here

    with path.open("rb") as file:
        try:
            table: Any = Reader(file).load()
        except ConfigError:
            raise
        except Exception as error:  # unpickling raises what the classes of the file raise
            raise ConfigError(
                f"{path} is no pickled table that can be read: {type(error).__name__}: {error}"
            ) from error
    if isinstance(table, _Attributes):
        held = vars(getattr(table, "handler", table))
        table = held.get("_infer", held.get("_data"))  # Qlib's processed data, or else its raw data
    if not isinstance(table, frames.DataFrame | frames.Series):
        raise ConfigError(f"{path} holds a {type(table).__name__}; a table is a DataFrame or a Series")
    return table
