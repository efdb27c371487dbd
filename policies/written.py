"""Written: the base of everything that people write about a policy."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Written(BaseModel):
    """Frozen, and unknown keys are refused: a misspelt rule must never be ignored."""

    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid", protected_namespaces=())
