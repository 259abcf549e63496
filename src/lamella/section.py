"""The base of all option tables: unknown keys and wrong types are refused, and options do not change once checked."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from lamella import registry


def file_name(value: str) -> str:
    """Return a name if a file can have it."""
    if not value or "\0" in value:
        raise ValueError("the name of a file")
    return value


Share = Annotated[float, Field(ge=0, le=1)]
FileName = Annotated[str, AfterValidator(file_name)]


class Section(BaseModel):
    """A table of a run file."""

    model_config = ConfigDict(**registry.STRICT, frozen=True, serialize_by_alias=True, defer_build=True)
