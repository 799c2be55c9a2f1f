"""Groups of HISCO and OCC1950 on some levels, as values of codes."""

from collections.abc import Collection, Sequence

from histocoder.classes.crosswalk import EXACT, NO_CODE, NO_VALUE, UNKNOWN, Match, code_in
from histocoder.errors import UserError
from histocoder.formatters.classifications import GROUPS, are_hisco, group_of
from histocoder.tables.header import plain
from histocoder.tables.table import fingerprint


class Groups:
    """Groups of codes on some levels, with their titles, which are found as the values of a
    `Crosswalk` are.
    """

    qualifiers = ()

    def __init__(self, system: str, levels: Sequence[str]) -> None:
        if system == "occ1950" and {*levels} != {"major"}:
            raise UserError("OCC1950 has major groups alone; give --levels major.")
        self._system = system
        self.classes = list(levels)
        self.scales: list[str] = []
        self.notices: list[str] = []
        self.value_cols = [name for level in levels for name in (level, f"{level}_title")]
        self.identity = {"table": f"groups of {system.upper()}", "sha256": fingerprint(GROUPS)}

    def find(self, code: str | None, *_: str | None) -> list[Match]:
        """Return the number of each level's group, and its title."""
        full_code = code_in(code)
        if full_code is None:
            return [Match(None, NO_CODE)] * len(self.value_cols)

        # -1 and the like are codes without a group
        missing = Match(None, NO_VALUE if full_code.startswith("-") else UNKNOWN)
        matches = []
        for level in self.classes:
            for value in group_of(self._system, level, full_code):
                matches.append(Match(value, EXACT) if value else missing)
        return matches


def system_of(column: str, codes: Collection[str] | None = None) -> str | None:
    """Return the classification that has groups, by the name of a column of codes and, if given,
    the codes.
    """
    if plain(column).startswith("occ1950"):
        return "occ1950"
    return "hisco" if codes is None or are_hisco(codes) else None
