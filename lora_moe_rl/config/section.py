"""What all sections of a config are."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False
    )


def is_set(section: Section, name: str) -> bool:
    """Whether the user gave a key a value other than the default: a saved config holds every key,
    and must run again as it is."""
    return name in section.model_fields_set and (
        getattr(section, name) != type(section).model_fields[name].default
    )
