"""What all sections of a config are."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

# 30 days, of every time-out: beyond some others the clocks of torch's and Python's waits overflow.
LONGEST_WAIT_S = 30 * 24 * 3600


class NoNumber(ValueError):
    """True or false in the place of a number."""


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """pydantic would take true for 1: draw_again=true for "once", a learning rate for 1."""
        assert info.field_name is not None
        annotation = cls.model_fields[info.field_name].annotation
        if _holds_bool(value) and not _takes_bool(annotation):
            raise NoNumber
        return value

    def stood_for(self) -> Mapping[str, Any]:
        """Settings that a short name among the values has brought along."""
        return {}


def is_set(section: Section, name: str) -> bool:
    """Whether the user gave a key a value other than the default: a saved config holds every key,
    and must run again as it is."""
    return name in section.model_fields_set and (
        getattr(section, name) != type(section).model_fields[name].default
    )


def _holds_bool(value: Any) -> bool:
    waiting = [value]  # however deep a file from elsewhere is
    while waiting:
        one = waiting.pop()
        if isinstance(one, bool):
            return True
        if isinstance(one, Mapping):
            waiting += one.values()
        elif isinstance(one, list | tuple):
            waiting += one
    return False


@cache
def _takes_bool(annotation: Any) -> bool:
    """Whether true or false may be in a value of this type; what sections hold, they see to."""
    if annotation in (bool, Any) or isinstance(annotation, bool):
        return True
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return True
    return any(map(_takes_bool, get_args(annotation)))
