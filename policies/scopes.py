"""Scopes: what a use case or a label's value leaves of what the tenant may do. They only ever narrow."""

from __future__ import annotations

from datetime import date
from typing import Literal, Self

from policies.facts import Transport
from policies.written import Written
from shapes import Field, model_validator

RESERVED = frozenset({"tenant"})
"""Facts that stand among the labels and that nobody may label a request with."""

Name = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"


class Scope(Written):
    """Null leaves everything that the tenant's policy allows."""

    models: tuple[str, ...] | None = None
    """Model groups; `prefix*` is a wildcard."""
    transports: tuple[Transport, ...] | None = None
    """Lanes; the order of preference stays the tenant's."""
    regions: tuple[str, ...] | None = None


class UseCase(Scope):
    """One purpose that a tenant uses models for, as its owner registered and somebody approved it."""

    id: str = Field(pattern=Name)
    owner: str = Field(min_length=1)
    risk: Literal["low", "medium", "high", "prohibited"]
    """`prohibited` is refused, approved or not."""
    approved_by: str | None = Field(None, min_length=1)
    """Null: not approved yet, hence refused."""
    review_by: date | None = None
    """Last day (UTC) on which the approval holds."""
    labels: tuple[str, ...] = ()
    """Values of one label: requests with a key that is bound to no use case belong here by them."""

    @model_validator(mode="after")
    def _approval_ends(self) -> Self:
        if self.approved_by is not None and self.review_by is None:
            raise ValueError(f"use case {self.id!r} is approved and needs review_by, the day its approval ends")
        return self


Labels = dict[str, dict[str, Scope]]
"""By label and value: what a request that carries the value may do."""


def check(use_cases: tuple[UseCase, ...], labels: Labels) -> dict[str, str]:
    """The label of every value. Raises ValueError for names that clash or lead nowhere."""
    label_of: dict[str, str] = {}
    for label, values in labels.items():
        if label in RESERVED:
            raise ValueError(f"labels: {label!r} is not a label's name: requests carry that fact already")
        if not values:
            raise ValueError(f"labels.{label} lists no value")
        for value in values:
            if "," in value or value != value.strip() or not value:
                raise ValueError(f"labels.{label}: a value is text without commas")
            if value in label_of:
                raise ValueError(f"labels: the value {value!r} belongs to {label_of[value]!r} and to {label!r}")
            label_of[value] = label
    _check_cases(use_cases, label_of)
    return label_of


def _check_cases(use_cases: tuple[UseCase, ...], label_of: dict[str, str]) -> None:
    ids, bound = set[str](), dict[str, str]()
    for case in use_cases:
        if case.id in ids:
            raise ValueError(f"use_cases: the id {case.id!r} is used twice")
        ids.add(case.id)
        for value in case.labels:
            if value not in label_of:
                raise ValueError(f"use case {case.id!r}: {value!r} is not a value of any label")
            if value in bound:
                raise ValueError(f"use_cases: {bound[value]!r} and {case.id!r} are both bound to {value!r}")
            bound[value] = case.id
    # With two labels a request could lose one of them and with it a use case that says no.
    if len({label_of[value] for value in bound}) > 1:
        raise ValueError("use_cases: labels that bind use cases must be values of one label")
