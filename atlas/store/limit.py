"""A bound on the rows of a query that states none itself."""

from __future__ import annotations

from atlas.store.guard import tokens

__all__ = ["limited"]


def limited(cypher: str, rows: int) -> str:
    """The query with `LIMIT rows` after its last RETURN, where it has no LIMIT there and is no UNION.

    A query that states a limit keeps it; a UNION's parts cannot be bounded from outside, so it stays as
    it is.

    >>> limited("MATCH (n) RETURN n.id", 10).split(chr(10))
    ['MATCH (n) RETURN n.id', 'LIMIT 10']
    >>> limited("MATCH (n) RETURN n.id LIMIT 3", 10)
    'MATCH (n) RETURN n.id LIMIT 3'
    """
    found = tokens(cypher)
    while found and found[-1].text == ";":
        found.pop()
    words = [token.keyword if token.depth == 0 else "" for token in found]
    if "RETURN" not in words or "UNION" in words or words[0] in ("EXPLAIN", "PROFILE"):
        return cypher
    last = len(words) - 1 - words[::-1].index("RETURN")
    if "LIMIT" in words[last:]:
        return cypher
    end = found[-1].start + len(found[-1].text)
    return f"{cypher[:end]}\nLIMIT {rows}"  # on its own line: what stands behind may be a comment's beginning
