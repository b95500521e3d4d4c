"""Commands that look something up: they import no tensor library and answer at once."""

from __future__ import annotations

import click

from atlas.cli.asked import atlas_option, json_option, opened, print_answer

__all__ = ["edges", "feature", "head", "info", "paths", "search"]

COUNT = click.IntRange(min=1)

type_option = click.option(
    "--type",
    "types",
    multiple=True,
    type=click.Choice(["DIRECT", "VIA_HEAD"], case_sensitive=False),
    help="Only these edges between features.",
)

by_option = click.option(
    "--by", type=click.Choice(["weight", "z"]), default="weight", show_default=True, help="Order by its size."
)


@click.command()
@click.option("--dropped", is_flag=True, help="What the selection of edges dropped, by layers and heads.")
@atlas_option
@json_option
def info(dropped: bool, where: str | None, as_json: bool) -> None:
    """What an atlas holds: models, dictionaries, counts, sizes, runs, what its selection dropped."""
    with opened(where) as atlas:
        print_answer(atlas.dropped() if dropped else atlas.info(), as_json)


@click.command()
@click.argument("key")
@click.option("--limit", type=COUNT, default=10, show_default=True, help="Rows of each table.")
@atlas_option
@json_option
def feature(key: str, limit: int, where: str | None, as_json: bool) -> None:
    """A feature: what it reads, what it promotes, its strongest neighbours.

    KEY is model/set/L08.mlp/355, or short: n8[355] (alias, layer, number), L8M355 (layer, MLP, number).
    """
    with opened(where) as atlas:
        print_answer(atlas.feature(key).page(limit), as_json)


@click.command()
@click.argument("key")
@click.option("--up", "direction", flag_value="up", help="Edges into it.")
@click.option("--down", "direction", flag_value="down", help="Edges out of it.")
@type_option
@click.option("--limit", type=click.IntRange(min=0), default=20, show_default=True, help="Rows; 0 for all.")
@by_option
@click.option("--via", metavar="L.H", help="Only through this head.")
@click.option("--layer", type=click.IntRange(min=0), help="Only neighbours of this layer.")
@atlas_option
@json_option
def edges(
    key: str,
    direction: str | None,
    types: tuple[str, ...],
    limit: int,
    by: str,
    via: str | None,
    layer: int | None,
    where: str | None,
    as_json: bool,
) -> None:
    """The edges out of a feature (--down, the default) or into it (--up), strongest first."""
    with opened(where) as atlas:
        table = atlas.edges(
            key,
            direction or "down",
            types=types or ("DIRECT", "VIA_HEAD"),
            by=by,
            limit=limit or None,
            via=via,
            layer=layer,
        )
        print_answer(table, as_json)


@click.command()
@click.argument("token", required=False)
@click.option("--label", metavar="TEXT", help="Instead of TOKEN: features whose label has this text in it.")
@click.option("--limit", type=COUNT, default=10, show_default=True, help="Rows for each token.")
@atlas_option
@json_option
def search(token: str | None, label: str | None, limit: int, where: str | None, as_json: bool) -> None:
    """The features that TOKEN's embedding feeds, and the features that promote or lower it.

    TOKEN is its text; "the" finds ' the' too. #123 is the token with that id.
    """
    if (token is None) == (label is None):
        raise click.UsageError("expected a TOKEN or --label TEXT" + ("" if token is None else ", not both"))
    with opened(where) as atlas:
        if label is not None:
            print_answer(atlas.search_labels(label, limit), as_json)
        elif token is not None:
            print_answer(atlas.search(token, limit), as_json)


@click.command()
@click.argument("head", metavar="L.H")
@click.option("--limit", type=COUNT, default=20, show_default=True, help="Pairs.")
@by_option
@atlas_option
@json_option
def head(head: str, limit: int, by: str, where: str | None, as_json: bool) -> None:
    """The strongest pairs that head L.H carries, and its share by source and target layer."""
    with opened(where) as atlas:
        print_answer(atlas.head(head, limit, by=by), as_json)


class Hops(click.ParamType):
    """`2`, or `1..3`."""

    name = "N or A..B"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, int]:
        first, dots, last = str(value).partition("..")
        if not first.isdecimal() or (dots and not last.isdecimal()):
            self.fail(f"expected a number of hops, or two as in 1..3, found {value!r}", param, ctx)
        low, high = int(first), int(last or first)
        if not low <= high <= 5:
            self.fail(f"expected at most 5 hops, the fewer first, found {value!r}", param, ctx)
        return low, high


@click.command()
@click.argument("source", metavar="FROM")
@click.argument("target", metavar="TO")
@click.option("-k", type=COUNT, default=5, show_default=True, help="How many paths.")
@click.option(
    "--hops", type=Hops(), default="1..3", show_default=True, help="DIRECT and VIA_HEAD edges of a path."
)
@type_option
@atlas_option
@json_option
def paths(
    source: str,
    target: str,
    k: int,
    hops: tuple[int, int],
    types: tuple[str, ...],
    where: str | None,
    as_json: bool,
) -> None:
    """The strongest paths FROM a token (or feature) TO another, by the product of the weights along them.

    From a token: EMBEDS, then one to three DIRECT or VIA_HEAD, then PROMOTES. The search is exact over the
    edges kept. Weights are input-invariant: a path says what could flow, not what caused anything on a
    prompt.
    """
    with opened(where) as atlas:
        print_answer(
            atlas.paths(source, target, k, hops=hops, types=types or ("DIRECT", "VIA_HEAD")), as_json
        )
