"""Names and values in messages: the nearest known name, lists of names, shortened values."""

from __future__ import annotations

from collections.abc import Iterable


def closest_name(name: object, candidates: Iterable[object]) -> str | None:
    """The candidate most similar to ``name``, or None if no candidate is similar.

    Upper and lower case count as equal, and so do `-` and `_`.
    """
    from difflib import get_close_matches

    if not isinstance(name, str) or len(name) > 80:
        return None
    by_lower = {str(c).lower().replace("-", "_"): str(c) for c in candidates}
    found = get_close_matches(name.lower().replace("-", "_"), by_lower, n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


def did_you_mean(name: object, candidates: Iterable[object]) -> str:
    """``; did you mean X?`` for the end of a message, or an empty text if no candidate is similar.

    >>> did_you_mean("al_reduce", ["all_reduce", "broadcast"])
    '; did you mean all_reduce?'
    """
    found = closest_name(name, candidates)
    return f"; did you mean {found}?" if found is not None and found != name else ""


def name_list(candidates: Iterable[object], limit: int = 12) -> str:
    """Names for a message in the given order: ``a, b, c``, cut after ``limit`` names.

    The text is ``none`` if there are no names.
    """
    names = [str(c) for c in candidates]
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more if names else "none"


def unknown_value_text(value: object, words: Iterable[str]) -> str:
    """The message for a value that is none of ``words``.

    >>> unknown_value_text("ncll", ["gloo", "nccl", "mpi"])
    "unknown value 'ncll'; did you mean 'nccl'?"
    >>> unknown_value_text("ucx", ["gloo", "nccl", "mpi"])
    "unknown value 'ucx'; expected one of gloo, nccl, mpi"
    """
    known = tuple(words)
    if not isinstance(value, str):
        return f"expected one of {', '.join(known)}, found {value_text(value)}"
    similar = closest_name(value, known)
    if similar is not None:
        return f"unknown value {value_text(value)}; did you mean {similar!r}?"
    return f"unknown value {value_text(value)}; expected one of {', '.join(known)}"


def value_text(value: object) -> str:
    """A value for the end of a message: ``'abc'``, ``12``, ``a mapping``, ``nothing``.

    The text is cut to 60 characters.
    """
    if value is None:
        return "nothing"
    if isinstance(value, dict | list | tuple):
        return "a mapping" if isinstance(value, dict) else "a list"
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
