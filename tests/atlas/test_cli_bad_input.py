"""Bad input as a user meets it, through the command line: one line that says what is wrong and where, exit
code 2, no traceback, and nothing written or left behind.

What each format can get wrong in detail is tested with its reader (tests/ingest).
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from atlas.cli import main
from atlas.store import open_store
from atlas.store.checksum import content_checksum
from tests.atlas.program import Program
from tests.atlas.small_atlas import build as build_small_atlas
from tests.atlas.tiny_source import HEADER, LATENTS, WIDTH, write_source, write_transcoders
from workers.artifacts import Artifacts

Damage = Callable[[Path], object]
"""Spoils something in a folder that holds `spec.yaml`, `model` and `transcoders`."""

SPEC = HEADER + "edges: [{types: [DIRECT], keep: {top: 1}}]\n"
UP = "model.layers.1.mlp.up_proj.weight"
NOBODY = 65534


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good source and an atlas built from it."""
    folder = write_source(tmp_path_factory.mktemp("good"))
    (folder / "spec.yaml").write_text(SPEC)
    with pytest.raises(SystemExit) as end:
        main(["build", str(folder / "spec.yaml"), "--out", str(folder / "tiny.atlas"), "--workers", "2"])
    assert not end.value.code
    return folder


@pytest.fixture
def here(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the good source, without the atlas, as the current folder."""
    monkeypatch.delenv("ATLAS", raising=False)
    folder = shutil.copytree(good, tmp_path / "here", ignore=shutil.ignore_patterns("*.atlas"))
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An atlas to look things up in."""
    return build_small_atlas(tmp_path_factory.mktemp("small") / "small.atlas").path


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Every path with its size and the time of its last change."""
    stats = {path: path.lstat() for path in folder.rglob("*")}
    return {
        str(path.relative_to(folder)): (
            (0, 0) if stat.S_ISDIR(found.st_mode) else (found.st_size, found.st_mtime_ns)
        )
        for path, found in stats.items()
    }


def refused(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line with which the command line refuses the arguments; the folder is as it was."""
    before = listing(folder)
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    said = capsys.readouterr()
    assert (end.value.code, said.out) == (2, ""), said
    assert listing(folder) == before
    return one_line(said.err)


def one_line(err: str) -> str:
    """The only line of what was said, less the progress of slow parts and what the program's server adds."""
    aside = r"[\w ]+: \d+ s|started"
    lines = [line for line in err.splitlines() if not re.fullmatch(aside, line)]
    assert len(lines) == 1 and lines[0].startswith("error: "), err
    assert "Traceback" not in err and not re.search(r"\b\w*(Error|Exception)\b\(", err)
    return lines[0]


def tensors(path: str, change: Callable[[dict[str, np.ndarray]], object]) -> Damage:
    """Damage to the tensors of a file."""

    def damage(folder: Path) -> None:
        values = dict(load_file(folder / path))
        change(values)
        save_file(values, folder / path, metadata={"format": "pt"})

    return damage


def put(name: str, changed: np.ndarray) -> Callable[[dict[str, np.ndarray]], object]:
    return lambda values: values.update({name: changed})


def latents(change: Callable[[dict[str, np.ndarray]], object]) -> Damage:
    return tensors(LAYER_1, change)


def cut(path: str, share: float) -> Damage:
    """Leaves so much of a file."""

    def damage(folder: Path) -> None:
        content = (folder / path).read_bytes()
        (folder / path).write_bytes(content[: int(share * len(content))])

    return damage


def spec(text: str) -> Damage:
    return lambda folder: (folder / "spec.yaml").write_text(text)


def spoil(name: str, value: float) -> Callable[[dict[str, np.ndarray]], object]:
    """Sets one number in the middle."""

    def change(values: dict[str, np.ndarray]) -> None:
        flat = values[name].reshape(-1)
        flat[len(flat) // 2] = value

    return change


def another_width(folder: Path) -> None:
    shutil.rmtree(folder / "transcoders")
    write_transcoders(folder / "transcoders", width=WIDTH // 2)


def recorded(model_hash: str) -> Damage:
    def damage(folder: Path) -> None:
        with (folder / "transcoders" / "config.yaml").open("a") as file:
            file.write(f"model_hash: {model_hash}\n")

    return damage


def from_gguf(content: bytes | None) -> Damage:
    """The spec asks for neurons of a GGUF file of this content."""

    def damage(folder: Path) -> None:
        if content is not None:
            (folder / "model.gguf").write_bytes(content)
        sets = "dictionaries: {n: {model: m, format: neurons}}"
        (folder / "spec.yaml").write_text(f"atlas: 1\nmodels: {{m: {{path: model.gguf}}}}\n{sets}\n")

    return damage


def half_a_gguf(folder: Path) -> None:
    """A good header, and the end of the tensors gone."""
    from tests.ingest.test_models_gguf import write_gguf
    from tests.ingest.tiny_models import tiny_model

    content = write_gguf(folder / "model.gguf", tiny_model("llama"), "llama").read_bytes()
    from_gguf(content[:-5000])(folder)


def remove(path: str) -> Damage:
    def damage(folder: Path) -> None:
        place = folder / path
        shutil.rmtree(place) if place.is_dir() else place.unlink()

    return damage


def folder_instead(folder: Path) -> None:
    (folder / "spec.yaml").unlink()
    (folder / "spec.yaml").mkdir()


def binary(folder: Path) -> None:
    (folder / "spec.yaml").write_bytes(b"\x89PNG\r\n\xff")


def layer_too_many(folder: Path) -> None:
    shutil.copy(folder / LAYER_1, folder / "transcoders" / "layer_7.safetensors")


def layer_too_few(folder: Path) -> None:
    (folder / "transcoders" / "layer_2.safetensors").unlink()
    spec(SPEC.replace("path: transcoders}", "path: transcoders, layers: [2]}"))(folder)


def bert(folder: Path) -> None:
    config = {"model_type": "bert", "architectures": ["BertForMaskedLM"]}
    (folder / "model" / "config.json").write_text(json.dumps(config))


CONFIG, MODEL, LAYER_1 = "model/config.json", "model/model.safetensors", "transcoders/layer_1.safetensors"
ZEROS = np.zeros((LATENTS, WIDTH), np.float32)

BUILDS: dict[str, tuple[Damage, list[str]]] = {
    # files
    "spec missing": (remove("spec.yaml"), ["spec.yaml", "no such file"]),
    "spec empty": (spec(""), ["spec.yaml", "empty"]),
    "spec truncated": (spec(SPEC[:60]), ["spec.yaml", "line 3", "not YAML"]),
    "spec binary": (binary, ["spec.yaml", "UTF-8"]),
    "spec a folder": (folder_instead, ["spec.yaml", "directory"]),
    "model missing": (remove("model"), ["models.m.path", "no such file or directory"]),
    "weights missing": (remove(MODEL), ["model.safetensors", "no weights"]),
    "weights empty": (cut(MODEL, 0), [MODEL, "empty"]),
    "weights truncated": (cut(MODEL, 0.7), [MODEL, "truncated"]),
    "weights truncated in the header": (cut(MODEL, 0.001), [MODEL, "truncated"]),
    "configuration empty": (cut(CONFIG, 0), [CONFIG]),
    "configuration truncated": (cut(CONFIG, 0.5), [CONFIG]),
    "dictionaries missing": (remove("transcoders"), ["dictionaries.t.path", "no such file or directory"]),
    "dictionary empty": (cut(LAYER_1, 0), [LAYER_1, "empty"]),
    "dictionary truncated": (cut(LAYER_1, 0.7), [LAYER_1, "truncated"]),
    "dictionaries' configuration empty": (cut("transcoders/config.yaml", 0), ["transcoders/config.yaml"]),
    "GGUF missing": (from_gguf(None), ["model.gguf", "no such file"]),
    "GGUF empty": (from_gguf(b""), ["model.gguf", "empty"]),
    "GGUF truncated in the header": (from_gguf(b"GGUF\x03\0\0\0\x05"), ["model.gguf", "truncated"]),
    "GGUF truncated": (half_a_gguf, ["model.gguf", "truncated"]),
    # tensors
    "tensor missing": (tensors(MODEL, lambda found: found.pop(UP)), [UP, "missing"]),
    "tensor left over": (tensors(MODEL, put("score.weight", ZEROS)), ["score.weight", "left over"]),
    "tensor of another shape": (tensors(MODEL, put(UP, ZEROS)), [UP, "(20, 32)", "(24, 32)"]),
    "weights NaN": (tensors(MODEL, spoil(UP, np.nan)), [UP, "NaN"]),
    "weights infinite": (tensors(MODEL, spoil(UP, np.inf)), [UP, "infinity"]),
    "latents' tensor missing": (latents(lambda found: found.pop("b_enc")), [LAYER_1, "missing: b_enc"]),
    "latents' tensor left over": (latents(put("more", ZEROS)), [LAYER_1, "left over: more"]),
    "encoder and decoder": (latents(put("W_dec", ZEROS[1:])), [LAYER_1, "W_enc", "(20, 32)", "(19, 32)"]),
    "decoder and model": (latents(put("W_dec", ZEROS[:, 1:])), [LAYER_1, "(20, 31)", "d_model is 32"]),
    "latents NaN": (latents(spoil("W_dec", np.nan)), [LAYER_1, "W_dec", "NaN"]),
    "latents infinite": (latents(spoil("W_enc", -np.inf)), [LAYER_1, "W_enc", "infinite"]),
    # what does not belong together
    "dictionary of another width": (another_width, ["layer_0.safetensors", "width 16", "d_model is 32"]),
    "dictionary of another hash": (recorded("0123456789abcdef" * 4), ["model_hash", "0123456789ab"]),
    "dictionary of a layer too many": (layer_too_many, ["layer 7", "layers 0 to 2"]),
    "layer that the model lacks": (
        spec(SPEC.replace("neurons}", "neurons, layers: [0, 3]}")), ["layer 3", "layers 0 to 2"]
    ),
    "layer that the dictionaries lack": (layer_too_few, ["layer 2", "layers 0 to 1"]),
    "architecture": (bert, ["bert", "refused"]),
    # the spec
    "unknown key at the top": (spec(SPEC + "tokeniser: x\n"), ["spec.yaml", "line 5", "tokeniser"]),
    "unknown key of a rule": (spec(SPEC.replace("{top: 1}", "{topp: 1}")), ["line 4", "topp", "top"]),
    "unknown key of a model": (spec(SPEC.replace("model}", "model, bits: 4}", 1)), ["line 2", "bits"]),
    "spec of a newer version": (spec(SPEC.replace("atlas: 1", "atlas: 99")), ["line 1", "99", "newer"]),
}  # fmt: skip


@pytest.mark.parametrize("what", BUILDS)
def test_a_build_of_bad_input_writes_nothing(
    what: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, says = BUILDS[what]
    damage(here)
    line = refused(here, capsys, "build", "spec.yaml", "--out", "made/tiny.atlas")
    for said in says:
        assert said in line


# --- atlases and questions ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["feature", "n1[99]"], ["n1[99]", "0 to 11"]),
        (["feature", "smol/neurons/L09.mlp/3"], ["smol/neurons/L09.mlp/3"]),
        (["edges", "nonsense"], ["nonsense"]),
        (["search", "no such token"], ["no such token"]),
        (["query", "MATCH (f:Feature RETURN f"], ["RETURN"]),
        (["query", "FIND ALL FEATURES"], ["FIND"]),
        (["query", "MATCH (f:Featur) RETURN f"], ["Featur", "Feature"]),
        (["query", "MATCH (f:Feature) SET f.label = 'mine'"], ["SET", "would change the atlas"]),
        (["query", "MATCH (f:Feature) DETACH DELETE f"], ["would change the atlas"]),
        (["query", "COPY Feature TO 'stolen.csv'"], ["COPY"]),
        (["export", "out.neo4j"], ["out.neo4j"]),
        (["remove", "--run", "0000"], ["0000"]),
        (["remove", "--model", "another", "--yes"], ["another", "smol"]),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else None,
)
def test_a_question_that_cannot_be_answered_is_one_line(
    arguments: list[str], says: list[str], small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(small, capsys, *arguments, "--atlas", str(small))
    for said in says:
        assert said in line


READERS = [
    ["info"], ["feature", "n1[3]"], ["edges", "n1[3]"], ["search", "the"], ["head", "1.0"], ["runs"],
    ["paths", "the", "the"], ["query", "MATCH (n:Feature) RETURN count(*)"],
    ["export", "out", "--format", "csv"], ["load"], ["remove", "--model", "smol", "--yes"],
]  # fmt: skip


@pytest.mark.parametrize("arguments", READERS, ids=lambda value: value[0])
@pytest.mark.parametrize("what", ["missing", "a file", "another folder", "newer", "damaged", "empty"])
def test_a_place_that_holds_no_atlas_to_read_is_said_to_hold_none(
    arguments: list[str],
    what: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "some.atlas"
    says = "no atlas here"
    if what == "a file":
        path.write_text("mine")
    elif what != "missing":
        path.mkdir()
        (path / "notes.txt").write_text("mine")
    if what == "newer":
        (path / "atlas.json").write_text('{"schema": 99, "artifacts": "artifacts"}')
        says = "newer circuit-atlas (schema 99"
    elif what == "damaged":
        (path / "atlas.json").write_text('{"schema":')
        says = "atlas.json: damaged"
    elif what == "empty":
        (path / "notes.txt").unlink()
    assert says in refused(tmp_path, capsys, *arguments, "--atlas", str(path))


def test_building_into_an_atlas_of_a_newer_schema_changes_nothing(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "tiny.atlas").mkdir()
    (here / "tiny.atlas" / "atlas.json").write_text('{"schema": 99}')
    assert "newer circuit-atlas (schema 99" in refused(
        here, capsys, "build", "spec.yaml", "--out", "tiny.atlas"
    )


# --- disks --------------------------------------------------------------------------------------------------


@contextmanager
def small_disk(size: int) -> Iterator[tuple[Path, Callable[[], object] | None, Callable[[], object]]]:
    """A place with room for so many bytes, what a process must do to itself for that, and what makes room.

    A file system of its own where this user may mount one; elsewhere a bound on the size of every file.
    """
    with tempfile.TemporaryDirectory() as place:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place]
        if os.geteuid() == 0 and subprocess.run(mount, capture_output=True, check=False).returncode == 0:
            try:
                grow = ["mount", "-o", "remount,size=100m", place]
                yield Path(place), None, partial(subprocess.run, grow, check=True)
            finally:
                subprocess.run(["umount", place], check=True)
        else:
            bound = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (size, size))
            yield Path(place), bound, lambda: None


@pytest.mark.parametrize("kilobytes", [4, 64, 250, 600, 900, 1200, 2000])
def test_a_disk_that_fills_up_is_one_line_and_the_build_goes_on_when_there_is_room(
    kilobytes: int, good: Path, tmp_path: Path
) -> None:
    """From the making of the folder over the artifacts to the database; whatever of these comes last."""
    said = tmp_path / "said"
    with small_disk(kilobytes << 10) as (place, bound, make_room):
        atlas = place / "tiny.atlas"
        arguments = ("build", good / "spec.yaml", "--out", atlas, "--workers", "2")
        assert Program(*arguments, said=said, first=bound).wait(60) == 2, said.read_text()
        assert "disk is full" in one_line(said.read_text())
        assert not (atlas / "CURRENT").exists()
        left = {path.relative_to(atlas).parts[0] for path in atlas.rglob("*") if path.is_file()}
        assert left <= {"atlas.json", "artifacts", "specs", "builder.lock", ".load.lock"}
        assert atlas.exists() == ("artifacts" in left)  # nothing finished, nothing kept
        artifacts = Artifacts(atlas / "artifacts")
        assert not any((artifacts.root / "tmp").glob("*"))
        assert not any(artifacts.verify(name) for name in artifacts.names())
        make_room()
        assert Program(*arguments, said=said).wait(60) == 0, said.read_text()
        with open_store(atlas) as made, open_store(good / "tiny.atlas") as undisturbed:
            assert content_checksum(made) == content_checksum(undisturbed)


def test_a_disk_that_fills_up_leaves_the_atlas_that_was_there(small: Path, tmp_path: Path) -> None:
    said = tmp_path / "said"
    with small_disk(64 << 20) as (place, bound, _):
        atlas = shutil.copytree(small, place / "small.atlas")
        if bound is None:
            free = shutil.disk_usage(place).free
            (place / "filler").write_bytes(bytes(free - (100 << 10)))
        else:
            bound = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (100 << 10, 100 << 10))
        before = listing(atlas)
        assert Program("load", "--atlas", atlas, said=said, first=bound).wait(60) == 2, said.read_text()
        line = one_line(said.read_text())
        assert str(atlas) in line and "disk is full" in line
        assert listing(atlas) == before
        with open_store(atlas) as store:
            assert store.query("MATCH (n:Feature) RETURN count(*)").rows == ((36,),)


@pytest.fixture
def closed(good: Path) -> Iterator[Path]:
    """A folder that may be read but not written, with a source and an atlas in it, where others may look."""
    with tempfile.TemporaryDirectory() as temporary:
        Path(temporary).chmod(0o755)
        place = shutil.copytree(good, Path(temporary) / "closed")
        inside = [place, *place.rglob("*")]
        modes = {path: path.stat().st_mode for path in inside}
        for path in inside:
            path.chmod(0o555 if path.is_dir() else 0o444)
        try:
            yield place
        finally:
            for path, mode in modes.items():
                path.chmod(mode)


def _as_nobody(home: Path) -> None:
    """The superuser may write anywhere, so tests that it runs go on as somebody else."""
    os.environ["HOME"] = str(home)
    if os.geteuid() == 0:
        os.setgid(NOBODY)
        os.setuid(NOBODY)


@pytest.mark.parametrize("what", ["new", "new inside", "again", "other edges", "load", "remove", "export"])
def test_a_folder_that_may_not_be_written_is_one_line(what: str, closed: Path, tmp_path: Path) -> None:
    said, atlas, source = tmp_path / "said", closed / "tiny.atlas", closed / "spec.yaml"
    arguments: dict[str, list[str | Path]] = {
        "new": ["build", source, "--out", closed / "new.atlas"],
        "new inside": ["build", source, "--out", closed / "some" / "new.atlas"],
        "again": ["build", source, "--out", atlas],
        "other edges": ["build", closed / "before.yaml", "--out", atlas],
        "load": ["load", "--atlas", atlas],
        "remove": ["remove", "--model", "m", "--yes", "--atlas", atlas],
        "export": ["export", closed / "out", "--format", "csv", "--atlas", atlas],
    }
    before = listing(closed)
    command = Program(*arguments[what], said=said, first=partial(_as_nobody, closed))
    assert command.wait(60) == 2, said.read_text()
    line = one_line(said.read_text())
    assert str(closed) in line and ("writ" in line or "Permission denied" in line)
    assert listing(closed) == before


def test_an_atlas_that_may_not_be_written_can_be_read(closed: Path, tmp_path: Path) -> None:
    for arguments in (["info"], ["feature", "n1[3]"], ["query", "MATCH (f:Feature) RETURN count(*)"]):
        said = tmp_path / "said"
        command = Program(
            *arguments, "--atlas", closed / "tiny.atlas", said=said, first=partial(_as_nobody, closed)
        )
        assert command.wait(60) == 0, said.read_text()
