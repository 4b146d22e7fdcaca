"""`expect:` of a scenario: the results that `distsim test` compares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, model_validator

from distsim.backends import BACKEND_PROFILES
from distsim.common import units
from distsim.common.field_parsing import one_of
from distsim.common.message_text import value_text
from distsim.findings.codes import CODES
from distsim.operations.core.field_types import (
    FieldError,
    FieldErrorCollector,
    PerRank,
    per_rank,
    to_plain_data,
)
from distsim.scenario.format.models.base_model import FormatModel, parse_mapping
from distsim.scenario.format.models.scalars import (
    Duration,
    Ranks,
    choice,
    list_parser,
    parsed_by,
)

_NUMBERS_SCHEMA = {"x-def": "numbers"}
#: The key of an expected value that applies to all ranks without an entry.
OTHER_RANKS = "other_ranks"


class DurationBounds(FormatModel):
    """``{at_least, at_most}``: bounds of a duration."""

    at_least_ns: Duration | None = Field(
        default=None,
        alias="at_least",
        description="Lower bound.",
        examples=["10 ms"],
    )
    at_most_ns: Duration | None = Field(
        default=None, alias="at_most", description="Upper bound.", examples=["20 ms"]
    )

    @model_validator(mode="after")
    def _some(self) -> DurationBounds:
        if self.at_least_ns is None and self.at_most_ns is None:
            raise ValueError("expected `at_least` or `at_most`, such as `{at_most: 20 ms}`")
        if (
            self.at_least_ns is not None
            and self.at_most_ns is not None
            and self.at_least_ns > self.at_most_ns
        ):
            least, most = (
                units.duration_text(self.at_least_ns),
                units.duration_text(self.at_most_ns),
            )
            raise FieldError(
                f"`at_least` ({least}) is greater than `at_most` ({most})", ("at_least",)
            )
        return self


VERDICTS = ("invalid", "mismatch", "deadlock", "race", "leak", "ok")
OUTCOMES = ("completes", "hangs", "raises", "crashes", "wrong-data", "undefined")
_parse_outcome = choice(*OUTCOMES)


def _parse_outcomes(value: object) -> object:
    """One outcome, or one for each named backend."""
    if not isinstance(value, Mapping):
        return _parse_outcome(value)
    gather = FieldErrorCollector()
    for backend in value:
        gather.take(backend, choice(*BACKEND_PROFILES), backend)
    found = {
        backend: gather.take(backend, _parse_outcome, outcome) for backend, outcome in value.items()
    }
    gather.done()
    return found


def _parse_expected_value(value: object) -> object:
    """A number (which fills), `?` (unknown), or a nested list of them."""
    if isinstance(value, list | tuple):
        return list_parser(_parse_expected_value)(value)
    if value == "?" or isinstance(value, bool | int | float):
        return value
    raise ValueError(
        f"expected a number, a list of numbers, or `?` for unknown, found {value_text(value)}"
    )


def _parse_expected_values(value: object) -> Mapping[str, object]:
    return parse_mapping(
        value,
        "a mapping of tensors to numbers, such as `{x: {0: 6, 1: 6}}`",
        per_rank(_parse_expected_value, OTHER_RANKS),
    )


_parse_finding_code = one_of(CODES)


def _plain_values(values: dict[str, object]) -> dict[str, object]:
    return {name: _plain_numbers(numbers) for name, numbers in values.items()}


def _plain_numbers(numbers: object) -> object:
    if isinstance(numbers, PerRank):
        return numbers.written(to_plain_data, OTHER_RANKS)
    return to_plain_data(numbers)


_parse_dependence = choice("buffering", "schedule")


_OUTCOME_SCHEMA = {
    "anyOf": [
        {"enum": list(OUTCOMES)},
        {
            "type": "object",
            "propertyNames": {"enum": [*BACKEND_PROFILES]},
            "additionalProperties": {"enum": list(OUTCOMES)},
        },
    ]
}
_FINDING_CODES_SCHEMA = {"type": "array", "items": {"enum": list(CODES)}}


class Expectations(FormatModel):
    """Expected results. Omitted keys are not checked (`model_fields_set`). ``depends_on: null``
    means that the verdict depends on nothing.
    """

    verdict: Annotated[str | None, *parsed_by(choice(*VERDICTS), {"enum": list(VERDICTS)})] = Field(
        default=None,
        description="Verdict over all orders of events.",
        examples=["ok"],
    )
    depends_on: Annotated[
        str | None,
        *parsed_by(
            lambda v: None if v is None else _parse_dependence(v),
            {"enum": ["buffering", "schedule", None]},
        ),
    ] = Field(
        default=None,
        description="What the verdict depends on; `null`: on nothing.",
        examples=["buffering"],
    )
    outcome: Annotated[object, *parsed_by(_parse_outcomes, _OUTCOME_SCHEMA, lambda v: v)] = Field(
        default=None,
        description="Outcome of this run; `{gloo: …, nccl: …}` for several backends.",
        examples=["completes"],
    )
    ranks: Ranks | None = Field(
        default=None, description="Ranks that the verdict names.", examples=[[0, 1]]
    )
    core: Ranks | None = Field(
        default=None,
        description="Ranks of the wait-for cycle, or the ranks that caused the failure.",
        examples=[[0, 1]],
    )
    findings: Annotated[
        tuple[str, ...] | None,
        *parsed_by(list_parser(_parse_finding_code, "a list of codes"), _FINDING_CODES_SCHEMA),
    ] = Field(default=None, description="Codes of all findings.", examples=[["DS301"]])
    values: Annotated[
        dict[str, Any],
        *parsed_by(
            _parse_expected_values,
            {"type": "object", "additionalProperties": _NUMBERS_SCHEMA},
            _plain_values,
        ),
    ] = Field(
        default_factory=dict,
        description=(
            "Final values of tensors: one for all ranks, or by rank with `other_ranks`; `?` is an "
            "unknown value."
        ),
        examples=[{"grad": {0: 6, "other_ranks": 5}}],
    )
    makespan: DurationBounds | None = Field(
        default=None,
        description="Bounds of the total time, from the start to the end of the last rank.",
        examples=[{"at_most": "20 ms"}],
    )
    iteration: DurationBounds | None = Field(
        default=None,
        description="Bounds of the time of one iteration.",
        examples=[{"at_most": "20 ms"}],
    )
