"""What all codes of a program share: groups, call sites, signatures and findings."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from distsim.common.arrays import sorted_unique
from distsim.findings.codes import CODES
from distsim.findings.finding_types import Finding, Severity
from distsim.operations.core.resolved_call import RankGroup
from distsim.program.code import BoolVector, CallSite, IntVector, Vec, collapse_uniform
from distsim.program.memo_keys import vector_key


class _FindingKey(NamedTuple):
    """Calls with equal keys are one finding, on several ranks."""

    code: str
    site: int
    reason: str


class _GlobalRankTable(NamedTuple):
    """``ranks[row_of_group[i], r]``: global rank of group rank r in entry i of a group vector."""

    row_of_group: IntVector
    sizes: IntVector  # by row
    ranks: IntVector  # padded with 0


class ProgramTables:
    """Groups, call sites, signatures and findings of a program, numbered in order of creation."""

    def __init__(self, world_size: int, backend: str) -> None:
        self.world_size = world_size
        self.groups: list[RankGroup] = [RankGroup(0, "world", tuple(range(world_size)), backend)]
        self.sites: list[CallSite] = []
        self._site_numbers: dict[CallSite, int] = {}
        self._signatures: dict[Hashable, int] = {}
        self._findings: dict[_FindingKey, set[int]] = {}  # the ranks of each
        #: Group id -> the group of every rank of the world, in the partition that it belongs to.
        self._partition_of: dict[int, IntVector] = {}
        # Caches, by `vector_key` of a group vector.
        self._global_ranks: dict[Hashable, _GlobalRankTable] = {}
        self._partitions: dict[Hashable, list[IntVector]] = {}
        self._sizes: dict[Hashable, Vec] = {}

    # --- sites and signatures ---
    def site(self, site: CallSite) -> int:
        """The number of a call site in the tables."""
        number = self._site_numbers.get(site)
        if number is None:
            number = self._site_numbers[site] = len(self.sites)
            self.sites.append(site)
        return number

    def signature(self, agreement: Mapping[str, Hashable]) -> int:
        """A number for properties on which both sides of a call must agree."""
        key = tuple(sorted(agreement.items(), key=lambda item: item[0]))
        return self._signatures.setdefault(key, len(self._signatures))

    # --- groups ---
    def group(
        self,
        name: str,
        ranks: Iterable[int],
        backend: str | None = None,
        timeout_ns: int | None = None,
    ) -> int:
        """Make a group and return its id; torch sorts its ranks (semantics 2.3)."""
        number = len(self.groups)
        self.groups.append(RankGroup(number, name, tuple(sorted(ranks)), backend, timeout_ns))
        return number

    def partition(self, ids: IntVector) -> None:
        """Note that these groups, one per rank of the world, divide the world into parts."""
        for group in sorted_unique(ids).tolist():
            self._partition_of[group] = ids

    def is_member(self, group: Vec, ranks: IntVector) -> BoolVector:
        """Whether each rank is in the group of the same row. Ranks outside the world never are."""
        in_world = (ranks >= 0) & (ranks < self.world_size)
        if not isinstance(group, np.ndarray):
            if group == 0:
                return in_world
            return in_world & np.isin(ranks, self.groups[group].ranks)
        found = np.zeros(len(ranks), dtype=np.bool_)
        safe_ranks = np.where(in_world, ranks, 0)
        for partition in self._partitions_of(group):
            found |= partition[safe_ranks] == group
        return found & in_world

    def _partitions_of(self, group: IntVector) -> list[IntVector]:
        """The distinct partitions that these groups belong to."""
        key = vector_key(group)
        if key not in self._partitions:
            partitions = [self._partition_of.get(g) for g in sorted_unique(group).tolist()]
            distinct = {id(part): part for part in partitions if part is not None}
            self._partitions[key] = list(distinct.values())
        return self._partitions[key]

    def sizes(self, group: Vec) -> Vec:
        """The number of ranks of a group; for several groups a vector, if their sizes differ."""
        if not isinstance(group, np.ndarray):
            return self.groups[group].size
        key = vector_key(group)
        if key not in self._sizes:
            ids, which = np.unique(group, return_inverse=True)
            sizes = np.array([self.groups[g].size for g in ids.tolist()], dtype=np.int64)
            self._sizes[key] = collapse_uniform(sizes[np.asarray(which).reshape(-1)])
        return self._sizes[key]

    def global_ranks(
        self, group: IntVector, group_ranks: IntVector
    ) -> tuple[IntVector, BoolVector]:
        """Global ranks of group ranks (0 if one does not exist), and a mask of those that exist."""
        key = vector_key(group)
        if key not in self._global_ranks:
            self._global_ranks[key] = self._global_rank_table(group)
        row_of_group, sizes, table = self._global_ranks[key]
        exists = (group_ranks >= 0) & (group_ranks < sizes[row_of_group])
        return np.asarray(table[row_of_group, np.where(exists, group_ranks, 0)]), exists

    def _global_rank_table(self, group: IntVector) -> _GlobalRankTable:
        ids = sorted_unique(np.asarray(group))
        sizes = np.array([self.groups[g].size for g in ids.tolist()], dtype=np.int64)
        ranks = np.zeros((len(ids), int(sizes.max())), dtype=np.int64)
        for row, group_id in enumerate(ids.tolist()):
            ranks[row, : sizes[row]] = self.groups[group_id].ranks
        return _GlobalRankTable(np.asarray(np.searchsorted(ids, group)), sizes, ranks)

    # --- findings ---
    def report(self, code: str, site: int, reason: str, ranks: Iterable[int]) -> None:
        """Note an invalid call of some ranks; ``reason`` is a message, and a remedy below it."""
        self._findings.setdefault(_FindingKey(code, site, reason), set()).update(ranks)

    def findings(self) -> tuple[Finding, ...]:
        """Findings in the order of their places; one per place, code and reason."""

        def place_then_code(key: _FindingKey) -> tuple[tuple[str, int, int], str, str]:
            site = self.sites[key.site]
            return (site.file, site.line, site.column), key.code, key.reason

        return tuple(
            self._finding(key, tuple(sorted(self._findings[key])))
            for key in sorted(self._findings, key=place_then_code)
        )

    def _finding(self, key: _FindingKey, ranks: tuple[int, ...]) -> Finding:
        message, _, remedy = key.reason.partition("\n")
        # The message of DS112 already contains the remedy.
        if not remedy and key.code in CODES and key.code != "DS112":
            general = CODES[key.code].remedy
            remedy = general[0].lower() + general[1:].rstrip(".")
        severity: Severity = "warning" if key.code.startswith("DS9") else "error"
        first_rank = ranks[0] if ranks else None
        place = self.sites[key.site].place(first_rank)
        return Finding(
            key.code, severity, message, ranks, ranks, (remedy,) if remedy else (), (place,)
        )
