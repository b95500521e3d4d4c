"""The program `atlas`: its commands, and how it ends.

Exit codes: 0 done; 2 a mistake in what was asked or given, told in one line on stderr; 130 interrupted; 1 a
defect of the program itself (with `--debug`, every error shows its traceback). A reader that stops reading
early (`| head`) is no error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click

__all__ = ["COMMANDS", "PLAN_INTERRUPTED", "main", "program"]

COMMANDS = {
    # name: (module, what it does, in a line)
    "build": ("atlas.cli.build", "Compute the atlas that a spec describes; goes on where it stopped."),
    "estimate": ("atlas.cli.estimate", "What a build would take: edges, bytes, memory, time."),
    "demo": ("atlas.cli.demo", "Build the demo's atlas of a real model and look around in it."),
    "info": ("atlas.cli.lookups", "What an atlas holds."),
    "feature": ("atlas.cli.lookups", "A feature: its tokens and its strongest neighbours."),
    "edges": ("atlas.cli.lookups", "The edges into or out of a feature."),
    "search": ("atlas.cli.lookups", "Features that a token feeds, and that promote it."),
    "head": ("atlas.cli.lookups", "The strongest pairs an attention head carries."),
    "paths": ("atlas.cli.lookups", "The strongest paths from a token or feature to another."),
    "label": ("atlas.cli.label", "Names for features: import explanations, list them, remove them."),
    "dictionary": ("atlas.cli.dictionary", "What a dictionary's files are, and whether they fit a model."),
    "train": ("atlas.cli.train", "Train dictionaries that a spec describes; goes on where it stopped."),
    "evaluate": (
        "atlas.cli.evaluate",
        "Measure dictionaries on text: variance, cross-entropy, dead features.",
    ),
    "sheet": ("atlas.cli.sheet", "Judge features of two dictionaries blindly, then count."),
    "picture": ("atlas.cli.picture", "Draw a feature's neighbourhood, or a map of the atlas, as SVG."),
    "query": ("atlas.cli.query", "Ask in Cypher (read-only)."),
    "export": ("atlas.cli.export", "Write Parquet, CSV or GraphML."),
    "runs": ("atlas.cli.upkeep", "The runs that made an atlas."),
    "remove": ("atlas.cli.upkeep", "Take a run or a model out of an atlas."),
    "load": ("atlas.cli.upkeep", "Rebuild the database from the artifacts."),
    "doctor": ("atlas.cli.doctor", "What this machine has, what is missing, how to get it."),
}

PLAN_INTERRUPTED = "interrupted; what is finished is kept, the same command goes on from there"


class LazyGroup(click.Group):
    """A group whose commands are imported only when one of them runs; the help needs none of them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        import importlib

        module = importlib.import_module(COMMANDS[cmd_name][0])
        return getattr(module, cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            from difflib import get_close_matches

            near = get_close_matches(args[0], COMMANDS, n=2)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise click.UsageError(f"no command {args[0]!r}{hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


def _version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        from importlib.metadata import PackageNotFoundError, version

        try:
            click.echo(f"atlas {version('circuit-atlas')}")
        except PackageNotFoundError:  # run from its folder, without being installed
            click.echo("atlas, not installed")
        ctx.exit()


@click.group(
    cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.option("--debug", is_flag=True, help="Show tracebacks.")
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show the version."
)
def program(debug: bool) -> None:
    """Maps the circuits of language models into a graph that answers questions.

    An atlas is a folder NAME.atlas. Commands that read one take --atlas PATH, else $ATLAS, else the only
    *.atlas here.
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and ends the process."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = given[: given.index("--")] if "--" in given else given
    debug = "--debug" in options
    if debug:  # accepted wherever it stands
        given = [*(word for word in options if word != "--debug"), *given[len(options) :]]
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a token's text is no reason to fail
    sys.exit(_run(given, debug))


def _run(given: list[str], debug: bool) -> int:
    from atlas.errors import AtlasError
    from ingest.errors import InputError

    try:
        program.main(args=given, prog_name="atlas", standalone_mode=False)
        sys.stdout.flush()
        return 0
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.UsageError as error:
        _say(error.format_message())
        if error.ctx is not None:
            print(f"try: {error.ctx.command_path} --help", file=sys.stderr)
        return 2
    except click.ClickException as error:
        _say(error.format_message())
        return 2
    except (AtlasError, InputError) as error:
        if debug:
            raise
        _say(str(error))
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the flush at exit complains
        return 0
    except (click.Abort, KeyboardInterrupt) as interrupt:
        if debug and not isinstance(interrupt, click.Abort):
            raise
        cause = interrupt.__cause__ or interrupt  # click turns KeyboardInterrupt into Abort
        resumable = getattr(cause, "report", None) is not None or getattr(cause, "resumable", False)
        print(PLAN_INTERRUPTED if resumable else "interrupted", file=sys.stderr)
        return 130


def _say(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)
