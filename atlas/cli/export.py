"""`atlas export`: an atlas, a neighbourhood or a selection as Parquet, CSV or GraphML."""

from __future__ import annotations

from pathlib import Path

import click

from atlas.cli.asked import atlas_option, json_option, opened, print_answer

__all__ = ["export"]


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--format", type=click.Choice(["parquet", "csv", "graphml"]), help="Default: what OUT ends with."
)
@click.option("--around", metavar="KEY", help="Only the neighbourhood of a feature.")
@click.option(
    "--hops", type=click.IntRange(0, 5), default=1, show_default=True, help="With --around: how far."
)
@click.option("--top", type=click.IntRange(min=1), default=20, show_default=True,
              help="With --around: how many of a node's strongest edges are followed.")  # fmt: skip
@click.option(
    "--query", "cypher", metavar="CYPHER", help="Only the nodes that a query returns, and edges among them."
)
@click.option("--param", "params", multiple=True, metavar="NAME=VALUE", help="With --query: a parameter.")
@click.option("--type", "types", multiple=True, metavar="TYPE", help="Only these relationships, as DIRECT.")
@click.option("--force", is_flag=True, help="Replace OUT.")
@atlas_option
@json_option
def export(
    out: Path,
    format: str | None,
    around: str | None,
    hops: int,
    top: int,
    cypher: str | None,
    params: tuple[str, ...],
    types: tuple[str, ...],
    force: bool,
    where: str | None,
    as_json: bool,
) -> None:
    """Write OUT: a folder of Parquet or CSV files, one for each kind of node and edge, or one GraphML file.

    \b
    atlas export atlas-tables --format parquet
    atlas export near.graphml --around 'n8[355]' --hops 2 --top 5
    atlas export layer8.csv --query 'MATCH (f:Feature) WHERE f.layer = 8 RETURN f'
    """
    from atlas.cli.progress import counting
    from atlas.cli.query import parameters

    with opened(where) as atlas, counting(f"writing {out}") as progress:
        answer = atlas.export(
            out,
            format=format,
            around=around,
            hops=hops,
            top=top,
            query=cypher,
            parameters=parameters(params),
            types=[type.upper() for type in types] or None,
            overwrite=force,
            progress=progress,
        )
    print_answer(answer, as_json)
