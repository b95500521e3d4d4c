"""Generations: readers see the old state or the new one, whatever happens to the load beside them."""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from atlas.errors import AtlasError
from atlas.folder import AtlasFolder
from atlas.load import load_all, load_run, remove_model
from atlas.store import open_store
from atlas.store.arrays import open_arrays
from tests.atlas.conftest import Toy
from tests.atlas.synthetic import Synthetic
from tests.atlas.test_load import atlas_of, contents, with_step

ROOT = Path(__file__).parents[2]


def generations(path: Path) -> list[str]:
    return sorted(p.name for p in (path / "db").iterdir())


def test_a_reader_keeps_its_generation_until_it_closes(tmp_path: Path) -> None:
    path = atlas_of(tmp_path / "a.atlas", Synthetic(n_edges=50))
    count = "MATCH (f:Feature) RETURN count(*)"
    with open_store(path) as old:
        assert old.query(count).rows == ((48,),)
        other = Synthetic("other", n_edges=50)
        other.write(path)
        load_run(path, other.manifest())
        assert generations(path) == ["000001", "000002"]
        assert old.query(count).rows == ((48,),)
        with open_store(path) as new:
            assert new.query(count).rows == ((96,),)
        load_all(path)
        assert generations(path) == ["000001", "000003"]
        assert old.query(count).rows == ((48,),)
    load_all(path)
    assert generations(path) == ["000004"]
    assert sorted(p.name for p in (path / "csr").iterdir()) == ["000004"]


def test_a_killed_reader_holds_nothing(tmp_path: Path) -> None:
    path = atlas_of(tmp_path / "a.atlas", Synthetic(n_edges=50))
    code = (
        f"from atlas.store import open_store as o; s = o({str(path)!r}); print('open', flush=True); input()"
    )
    reader = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert reader.stdout is not None and reader.stdout.readline() == "open\n"
    load_all(path)
    assert generations(path) == ["000001", "000002"]
    reader.kill()
    reader.wait()
    load_all(path)
    assert generations(path) == ["000003"]


def _keep_loading(path: str) -> None:
    for _ in range(50):
        load_all(path)


def test_readers_open_while_loads_go_on(tmp_path: Path) -> None:
    path = atlas_of(tmp_path / "a.atlas", Synthetic(n_edges=50))
    loader = multiprocessing.get_context("spawn").Process(target=_keep_loading, args=(str(path),))
    loader.start()
    seen = set()
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and len(seen) < 3:
            with open_store(path) as store:
                seen.add(store.generation)
                assert store.query("MATCH (f:Feature) RETURN count(*)").rows == ((48,),)
    finally:
        loader.kill()
        loader.join()
    assert len(seen) == 3


def test_a_load_killed_at_any_moment_leaves_the_old_state_and_the_next_cleans_up(tmp_path: Path) -> None:
    """Kill -9, at instants spread over a load's whole length."""
    path = atlas_of(tmp_path / "a.atlas", Synthetic(n_edges=200))
    other = Synthetic("other", n_edges=200)
    other.write(path)
    before = contents(path)
    start = time.monotonic()
    expected = contents(
        atlas_of(tmp_path / "b.atlas", Synthetic(n_edges=200), Synthetic("other", n_edges=200))
    )
    length = (time.monotonic() - start) / 2
    random_instant = random.Random(0)
    context = multiprocessing.get_context("fork")
    survived = 0
    for _ in range(12):
        loader = context.Process(target=load_run, args=(path, other.manifest()))
        loader.start()
        time.sleep(random_instant.uniform(0, length))
        if loader.is_alive():
            os.kill(loader.pid or 0, signal.SIGKILL)
        loader.join()
        state = contents(path)
        assert state in (before, expected)
        if state == expected:
            survived += 1
            remove_model(path, "other")
    assert survived < 12, "no load was killed before it ended"
    load_run(path, other.manifest())
    assert contents(path) == expected
    assert len(generations(path)) == 1
    names = {file.name for file in path.rglob("*")}
    leftovers = {name for name in names if name == "mapped" or name.startswith((".ids", ".CURRENT"))}
    assert leftovers == set()


def test_two_loads_at_once_do_not_mix(tmp_path: Path) -> None:
    path = atlas_of(tmp_path / "a.atlas", Synthetic(n_edges=50))
    from filelock import FileLock

    with FileLock(path / ".load.lock"), pytest.raises(AtlasError, match="another process is loading"):
        load_all(path)


def _with_small_files(path: Path, limit: int, answer: multiprocessing.Queue) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        load_all(path)
        answer.put("loaded")
    except AtlasError as error:
        answer.put(str(error))


@pytest.mark.parametrize("limit", [2_000, 100_000, 400_000])
def test_a_full_disk_is_one_clear_line_and_changes_nothing(tmp_path: Path, limit: int) -> None:
    """A bound on file sizes stands in for the full disk: it stops the Parquet files, the database or
    the arrays.
    """
    path = atlas_of(tmp_path / "a.atlas", Synthetic(n_edges=20_000, size=400))
    before = AtlasFolder.open(path).current()
    answer: multiprocessing.Queue = multiprocessing.get_context("fork").Queue()
    loader = multiprocessing.get_context("fork").Process(target=_with_small_files, args=(path, limit, answer))
    loader.start()
    said = answer.get(timeout=20)
    loader.join()
    assert "disk is full" in said and "\n" not in said
    assert AtlasFolder.open(path).current() == before
    assert generations(path) == [before]
    with open_store(path) as store:
        assert store.query("MATCH (f:Feature) RETURN count(*)").rows == ((1600,),)


def _as_nobody(path: Path, answer: multiprocessing.Queue) -> None:
    if os.geteuid() == 0:
        os.setuid(65534)
    try:
        load_all(path)
        answer.put("loaded")
    except AtlasError as error:
        answer.put(str(error))


def test_a_folder_that_cannot_be_written_is_one_clear_line() -> None:
    with tempfile.TemporaryDirectory() as temporary:  # pytest's own folders are closed to other users
        Path(temporary).chmod(0o755)
        path = atlas_of(Path(temporary) / "a.atlas", Synthetic(n_edges=20))
        own = (path, path / "db", path / "csr")
        for folder in own:
            folder.chmod(0o555)
        context = multiprocessing.get_context("fork")
        answer: multiprocessing.Queue = context.Queue()
        loader = context.Process(target=_as_nobody, args=(path, answer))
        loader.start()
        said = answer.get(timeout=20)
        loader.join()
        for folder in own:
            folder.chmod(0o755)
        assert "not writable" in said and "\n" not in said
        assert generations(path) == ["000001"]


def test_what_is_no_atlas_says_so(tmp_path: Path) -> None:
    with pytest.raises(AtlasError, match="no atlas here"):
        open_store(tmp_path / "nothing")
    AtlasFolder.create(tmp_path / "new.atlas")
    with pytest.raises(AtlasError, match="nothing is loaded"):
        open_store(tmp_path / "new.atlas")
    (tmp_path / "file").write_text("")
    with pytest.raises(AtlasError, match="not a folder"):
        AtlasFolder.create(tmp_path / "file")
    with pytest.raises(AtlasError, match="no atlas here"):
        open_store(tmp_path / "file")


@pytest.mark.parametrize(
    ("marker", "says"),
    [
        ('{"schema": 99, "artifacts": "artifacts"}', "newer circuit-atlas .*upgrade"),
        ('{"schema": 0}', "build it again"),
        ("{", "damaged"),
        ("[]", "damaged"),
    ],
)
def test_an_atlas_of_another_schema_is_refused(tmp_path: Path, marker: str, says: str) -> None:
    path = atlas_of(tmp_path / "a.atlas", model := Synthetic(n_edges=20))
    (path / "atlas.json").write_text(marker)
    for refused in (
        lambda: open_store(path),
        lambda: load_run(path, model.manifest()),
        lambda: load_all(path),
    ):
        with pytest.raises(AtlasError, match=says):
            refused()


def test_a_damaged_database_is_named(tmp_path: Path) -> None:
    path = atlas_of(tmp_path / "a.atlas", Synthetic(n_edges=20))
    database = path / "db" / "000001" / "atlas.db"
    database.write_bytes(b"not a database" * 1000)
    with pytest.raises(AtlasError, match="load the atlas again"):
        open_store(path)
    load_all(path)
    with open_store(path) as store:
        assert store.query("MATCH (f:Feature) RETURN count(*)").rows == ((48,),)


def test_a_failing_load_keeps_ids_free(tmp_path: Path) -> None:
    """Blocks are written only with the generation that uses them."""
    path = atlas_of(tmp_path / "a.atlas", model := Synthetic(n_edges=20))
    before = (path / "ids.parquet").read_bytes()
    with pytest.raises(AtlasError):
        load_run(path, with_step(model, "missing"))
    assert (path / "ids.parquet").read_bytes() == before


@pytest.mark.parametrize("type", ["DIRECT", "VIA_HEAD", "EMBEDS", "PROMOTES"])
def test_the_arrays_are_the_edges_of_the_database(toy: Toy, type: str) -> None:
    arrays = open_arrays(toy.store.arrays, type)
    head = "r.layer, r.head" if type == "VIA_HEAD" else "0, 0"
    reading = "''" if type == "PROMOTES" else "r.reading"
    rows = toy.store.query(
        f"MATCH (a)-[r:{type}]->(b) RETURN a.id, b.id, {reading}, {head}, r.weight ORDER BY a.id, b.id"
    ).rows
    zero = np.zeros(len(rows), int)
    for adjacency, turn in ((arrays.out, 1), (arrays.into, -1)):
        number = adjacency.edge
        ends = np.stack(
            [np.repeat(np.arange(len(adjacency.indptr) - 1), np.diff(adjacency.indptr)), adjacency.indices]
        )
        source, target = ends[::turn]
        names = (
            [arrays.readings[code] for code in arrays.attributes["reading"][number]]
            if arrays.readings
            else None
        )
        found = zip(
            source.tolist(),
            target.tolist(),
            names or [""] * len(rows),
            arrays.attributes["layer"][number].tolist() if type == "VIA_HEAD" else zero.tolist(),
            arrays.attributes["head"][number].tolist() if type == "VIA_HEAD" else zero.tolist(),
            adjacency.weight.astype(float).tolist(),
            strict=True,
        )
        assert sorted(found) == sorted(rows)
    node = int(rows[0][0])
    mine = arrays.out.indices[arrays.out.row(node)].tolist()
    assert sorted(mine) == sorted(row[1] for row in rows if row[0] == node)
    assert arrays.out.row(10**9) == slice(0, 0)


def test_arrays_of_other_types_are_refused(toy: Toy) -> None:
    with pytest.raises(AtlasError, match="no adjacency arrays of USES"):
        open_arrays(toy.store.arrays, "USES")
