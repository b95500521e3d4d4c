"""`atlas query`: Cypher, read-only, with a limit on rows and on time."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from atlas.cli.asked import atlas_option, json_option, opened, print_answer
from atlas.errors import AtlasError

__all__ = ["query"]


@click.command()
@click.argument("cypher", required=False)
@click.option(
    "--file", type=click.Path(path_type=Path), help="Read the query from a file; - for standard input."
)
@click.option("--param", "params", multiple=True, metavar="NAME=VALUE",
              help="A parameter; VALUE as JSON (5, 1.5, true, [1, 2]), else text.")  # fmt: skip
@click.option("--limit", type=click.IntRange(min=0), default=1000, show_default=True, help="Rows; 0 for all.")
@click.option(
    "--timeout", type=click.FloatRange(min=0, min_open=True), default=60.0, show_default=True, help="Seconds."
)
@click.option("--csv", "as_csv", is_flag=True, help="CSV, with a line of column names.")
@atlas_option
@json_option
def query(
    cypher: str | None,
    file: Path | None,
    params: tuple[str, ...],
    limit: int,
    timeout: float,
    as_csv: bool,
    where: str | None,
    as_json: bool,
) -> None:
    """Ask in Cypher. The query reads; what would write is refused.

    \b
    atlas query 'MATCH (f:Feature)-[r:VIA_HEAD]->(g:Feature) WHERE r.rank_in = 1
                 RETURN f.key, g.key, r.weight LIMIT 5'
    atlas query 'MATCH (t:Token)-[e:EMBEDS]->(f:Feature) WHERE t.text = $text
                 RETURN f.key, e.weight' --param 'text= Paris'
    """
    text = _text(cypher, file)
    if as_csv and as_json:
        raise AtlasError("--csv and --json: expected one of them")
    with opened(where) as atlas:
        # Ctrl-C ends the process at once: Python cannot interrupt the engine, and a query writes nothing
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        table = atlas.query(text, parameters(params), timeout=timeout, limit=limit or None)
    if as_csv:
        _print_csv(table.columns, table.rows)
        for note in table.notes:
            print(note, file=sys.stderr)
    else:
        print_answer(table, as_json)
        if as_json:
            for note in table.notes:
                print(note, file=sys.stderr)


def _text(cypher: str | None, file: Path | None) -> str:
    if (cypher is None) == (file is None):
        raise AtlasError("expected a query, or --file with one" + ("" if cypher is None else ", not both"))
    if cypher is not None:
        return cypher
    assert file is not None
    if str(file) == "-":
        return sys.stdin.read()
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise AtlasError(f"{file}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise AtlasError(f"{file}: is not text in UTF-8; expected a query") from None


def parameters(params: Sequence[str]) -> dict[str, Any]:
    """`name=value` pairs as values. Raises AtlasError for what is no pair, and for a name given twice.

    >>> parameters(["l=5", "text= the", "ids=[1, 2]"])
    {'l': 5, 'text': ' the', 'ids': [1, 2]}
    """
    values: dict[str, Any] = {}
    for param in params:
        name, equals, value = param.partition("=")
        name = name.strip().removeprefix("$")
        if not equals or not name.isidentifier():
            raise AtlasError(f"--param {param}: expected NAME=VALUE")
        if name in values:
            raise AtlasError(f"--param {name}: given twice")
        try:
            values[name] = json.loads(value) if value.strip() == value else value
        except ValueError:
            values[name] = value
    return values


def _print_csv(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    import csv

    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow(
            json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else value
            for value in row
        )
