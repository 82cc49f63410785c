"""A base of models that users construct. A wrong field is refused by its name, without pydantic's report.

Data that is read (`model_validate`, `model_validate_json`) raises pydantic's ValidationError.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ValidationError

from leyden._lib.options import check_names
from leyden._lib.text import fault_reason, shown
from leyden.errors import InvalidArgument


class NamedFields(BaseModel):
    """A model whose constructor raises InvalidArgument with the field, the value and what is possible."""

    def __init__(self, **values: Any) -> None:
        kind = type(self)
        check_names(kind.__name__, values, kind.model_fields)
        try:
            super().__init__(**values)
        except ValidationError as error:
            refusal = InvalidArgument(_refusal(kind, error))
        else:
            return
        raise refusal  # outside the `except` block, so that the traceback leaves out pydantic's report

    # With this mark, pydantic's `model_validate` builds instances without calling this constructor.
    __init__.__dict__["__pydantic_base_init__"] = True


def _refusal(kind: type[BaseModel], error: ValidationError) -> str:
    """Return the message for refused constructor arguments: the missing ones if any, otherwise the wrong ones."""
    faults = error.errors(include_url=False)
    missing = [str(fault["loc"][0]) for fault in faults if fault["type"] == "missing" and len(fault["loc"]) == 1]
    if missing:
        required = [f"{name}=..." for name, field in kind.model_fields.items() if field.is_required()]
        return f"{kind.__name__} needs {', '.join(missing)}; write {kind.__name__}({', '.join(required)})"
    hides = kind.model_config.get("hide_input_in_errors", False)
    return "; ".join(
        f"{kind.__name__}'s {'.'.join(map(str, fault['loc']))} is "
        f"{type(fault['input']).__name__ if hides else shown(fault['input'])}: {fault_reason(fault)}"
        for fault in faults
    )
