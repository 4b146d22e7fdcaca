"""What the parts of a scenario have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from distsim.fields import tell
from distsim.scenario.scalars import wrong
from distsim.scenario.words import WORDS


class Part(BaseModel):
    """A mapping of the file. Frozen; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True, arbitrary_types_allowed=True, populate_by_name=True)

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: object) -> None:
        """The fields get their descriptions."""
        tell(cls, WORDS, cls.__name__.removeprefix("_"))

    def plain(self) -> dict[str, object]:
        """What a file would say: the keys that were given."""
        return self.model_dump(by_alias=True, exclude_unset=True)


def text_key(value: object) -> str:
    if not isinstance(value, str):
        raise wrong("a name", value)
    return value
