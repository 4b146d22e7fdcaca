"""Names and values in messages: the nearest known name to one that is not known, lists, what was
found.
"""

from __future__ import annotations

from collections.abc import Iterable


def closest_name(name: object, candidates: Iterable[object]) -> str | None:
    """The candidate that looks most like ``name``, or None when none does. Letter case counts
    little.
    """
    from difflib import get_close_matches

    if not isinstance(name, str) or len(name) > 80:
        return None
    by_lower = {str(c).lower().replace("-", "_"): str(c) for c in candidates}
    found = get_close_matches(name.lower().replace("-", "_"), by_lower, n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


def did_you_mean(name: object, candidates: Iterable[object]) -> str:
    """``; did you mean X?`` for the end of a message, or nothing when no candidate is near.

    >>> near("al_reduce", ["all_reduce", "broadcast"])
    '; did you mean all_reduce?'
    """
    found = closest_name(name, candidates)
    return f"; did you mean {found}?" if found is not None and found != name else ""


def name_list(candidates: Iterable[object], limit: int = 12) -> str:
    """Names for a message, in the order given: ``a, b, c``, cut after ``limit``; ``none`` when
    there are none.
    """
    names = [str(c) for c in candidates]
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more if names else "none"


def value_text(value: object) -> str:
    """A value for the end of a message: ``'abc'``, ``12``, ``a mapping``, ``nothing``; never
    long.
    """
    if value is None:
        return "nothing"
    if isinstance(value, dict | list | tuple):
        return "a mapping" if isinstance(value, dict) else "a list"
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
