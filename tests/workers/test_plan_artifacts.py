"""The artifact folder: whole or absent, first writer wins, damage found, full and forbidden disks."""

import os
import resource
import shutil
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ingest.errors import InputError
from tests.workers.killing import files_of
from workers.artifacts import Artifacts
from workers.local import LocalExecutor
from workers.plan import Done, Expand, Step, StepFailed, run_plan


def published(artifacts, step, files, answer=None):
    """The step's artifact with these files in it."""
    with artifacts.writing(step.name) as folder:
        for relative, content in files.items():
            (folder / relative).parent.mkdir(parents=True, exist_ok=True)
            (folder / relative).write_bytes(content)
        artifacts.publish(step, folder, answer or Done())
    return artifacts.path(step.name)


def run_one(root, function):
    artifacts = Artifacts(root)
    step = Step("one", 1)
    run_plan([step], LocalExecutor({"one": (1, function)}, artifacts), artifacts)


def test_a_result_lies_under_its_hash_with_a_manifest_that_names_every_file(tmp_path):
    artifacts, step = Artifacts(tmp_path), Step("one", 1)
    assert not artifacts.has(step.name) and artifacts.names() == []
    folder = published(artifacts, step, {"a.bin": b"abc", "deep/b.bin": b""}, Done({"z": 1.5, "a": "é"}))
    assert folder == tmp_path / step.name[:2] / step.name
    assert (folder / "figures.json").read_bytes() == '{"a":"é","z":1.5}\n'.encode()
    assert artifacts.figures(step.name) == {"a": "é", "z": 1.5}
    assert artifacts.has(step.name) and artifacts.verify(step.name) == []
    assert artifacts.names() == [step.name]
    assert artifacts.expansion(step.name) is None


def test_the_same_result_is_the_same_bytes_anywhere(tmp_path):
    answer = Expand((Step("two", 1, {"x": 1}, title="second"),))
    for place in ("here", "there"):
        published(Artifacts(tmp_path / place), Step("one", 1), {"a.bin": b"abc"}, answer)
    assert files_of(tmp_path / "here") == files_of(tmp_path / "there")


def test_an_expansion_is_read_back(tmp_path):
    child = Step("two", 1, {"x": 1}, {"from": "sha256:1"}, title="second")
    artifacts, step = Artifacts(tmp_path), Step("one", 1)
    published(artifacts, step, {}, Expand((child,)))
    (read,) = artifacts.expansion(step.name)
    assert (read.name, read.title, read.needs) == (child.name, child.title, child.needs)


@pytest.mark.parametrize(
    ("damage", "cheap"),
    [
        (lambda folder: (folder / "a.bin").write_bytes(b"ab"), True),
        (lambda folder: (folder / "a.bin").write_bytes(b"abd"), False),
        (lambda folder: (folder / "a.bin").unlink(), True),
        (lambda folder: (folder / "figures.json").write_text("{}"), True),
        (lambda folder: (folder / "manifest.json").unlink(), True),
        (lambda folder: (folder / "manifest.json").write_text('{"files'), True),
        (lambda folder: (folder / "c.bin").write_text("new"), False),
    ],
)
def test_damage_is_found(tmp_path, damage, cheap):
    artifacts, step = Artifacts(tmp_path), Step("one", 1)
    folder = published(artifacts, step, {"a.bin": b"abc", "b.bin": b""}, Done({"n": 1}))
    damage(folder)
    assert artifacts.has(step.name) is not cheap  # sizes are looked at when a plan resumes
    (line,) = artifacts.verify(step.name)
    assert str(folder) in line


def test_a_damaged_result_makes_way_for_a_whole_one(tmp_path):
    artifacts, step = Artifacts(tmp_path), Step("one", 1)
    folder = published(artifacts, step, {"a.bin": b"abc"})
    (folder / "a.bin").write_bytes(b"")
    published(artifacts, step, {"a.bin": b"abc"})
    assert artifacts.verify(step.name) == [] and not list((tmp_path / "tmp").iterdir())


def test_of_two_writers_the_first_wins(tmp_path):
    artifacts, step = Artifacts(tmp_path), Step("one", 1)
    with artifacts.writing(step.name) as first, artifacts.writing(step.name) as second:
        (first / "who").write_text("first")
        (second / "who").write_text("second")
        artifacts.publish(step, first, Done())
        artifacts.publish(step, second, Done())
    assert (artifacts.path(step.name) / "who").read_text() == "first"
    assert artifacts.verify(step.name) == [] and not list((tmp_path / "tmp").iterdir())


def test_a_writer_that_is_overtaken_between_look_and_rename_gives_way(tmp_path):
    class Overtaken(Artifacts):
        """Another writer publishes right after this one saw that nothing is there."""

        def has(self, name):
            there = super().has(name)
            if not there:
                published(Artifacts(tmp_path), step, {"who": b"other"})
            return there

    step = Step("one", 1)
    published(Overtaken(tmp_path), step, {"who": b"overtaken"})
    assert (Artifacts(tmp_path).path(step.name) / "who").read_text() == "other"


def test_a_result_is_never_seen_half_there(tmp_path):
    artifacts = Artifacts(tmp_path)
    steps = [Step("one", 1, {"i": i}) for i in range(5)]
    files = {f"{i}.bin": bytes([i]) * 1000 for i in range(100)}
    seen, over = set(), threading.Event()

    def watch():
        while not over.is_set():
            for step in steps:
                if (folder := artifacts.path(step.name)).exists():
                    seen.add(sum(1 for _ in folder.iterdir()))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for step in steps:
            published(artifacts, step, files)
    finally:
        over.set()
        watcher.join()
    assert seen == {102}  # all files, the figures and the manifest, or nothing


def test_many_writers_of_many_results_leave_whole_ones(tmp_path):
    artifacts = Artifacts(tmp_path)
    steps = [Step("one", 1, {"i": i}) for i in range(5)]
    gate, errors = threading.Barrier(6), []

    def write(writer):
        try:
            gate.wait(10)
            for step in steps:
                published(artifacts, step, {"a": bytes([writer]) * 10_000, "b": bytes([writer]) * 10_000})
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and not list((tmp_path / "tmp").iterdir())
    for step in steps:
        assert artifacts.verify(step.name) == []
        folder = artifacts.path(step.name)
        assert (folder / "a").read_bytes() == (folder / "b").read_bytes()  # of one writer


def test_a_result_that_was_removed_is_gone_from_the_disk(tmp_path):
    artifacts, step = Artifacts(tmp_path), Step("one", 1)
    published(artifacts, step, {"a": b"1"})
    artifacts.discard(step.name)
    artifacts.discard(step.name)  # twice is once
    assert artifacts.names() == [] and not list((tmp_path / "tmp").iterdir())


@pytest.mark.parametrize("figures", [{"x": float("inf")}, {"x": np.float32(1)}])
def test_figures_that_json_cannot_hold_fail_the_step(tmp_path, figures):
    with pytest.raises(StepFailed, match=r"JSON"):
        run_one(tmp_path, lambda step, inputs, out, context: Done(figures))
    assert Artifacts(tmp_path).names() == []


def test_a_step_may_write_plain_files_only_and_not_ours(tmp_path):
    def ours(step, inputs, out, context):
        (out / "manifest.json").write_text("{}")
        return Done()

    def link(step, inputs, out, context):
        (out / "link").symlink_to("/")
        return Done()

    with pytest.raises(StepFailed, match=r"wrote manifest\.json"):
        run_one(tmp_path, ours)
    with pytest.raises(StepFailed, match="plain files only"):
        run_one(tmp_path, link)
    assert Artifacts(tmp_path).names() == []


@contextmanager
def files_limited_to(size):
    """No file grows beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path):
    def to_a_full_device(step, inputs, out, context):
        (out / "table").symlink_to("/dev/full")  # every write to it: no space left on device
        (out / "table").write_bytes(b"x" * 100_000)
        return Done()

    def past_the_limit(step, inputs, out, context):
        pq.write_table(pa.table({"x": range(1_000_000)}), out / "table.parquet")
        return Done()

    with files_limited_to(100_000):
        for function in (to_a_full_device, past_the_limit):
            with pytest.raises(InputError, match="the disk is full") as caught:
                run_one(tmp_path, function)
            assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)
            assert not list((tmp_path / "tmp").iterdir()) and Artifacts(tmp_path).names() == []


@contextmanager
def as_nobody():
    """Without root's right to write anywhere."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_read_only_folder_is_one_line(tmp_path):
    # Not under tmp_path: nobody but its owner may look into that.
    folder = Path(tempfile.mkdtemp())
    try:
        artifacts = folder / "artifacts"
        artifacts.mkdir()
        artifacts.chmod(0o555)
        folder.chmod(0o755)
        with as_nobody(), pytest.raises(InputError, match=f"{artifacts}: cannot be used .Permission denied."):
            run_one(artifacts, lambda step, inputs, out, context: Done())
        assert not list(artifacts.iterdir())
    finally:
        artifacts.chmod(0o755)
        shutil.rmtree(folder)


def test_a_file_in_the_folders_place_is_one_line(tmp_path):
    (tmp_path / "artifacts").write_text("")
    with pytest.raises(InputError, match="expected a folder, found a file"):
        run_one(tmp_path / "artifacts", lambda step, inputs, out, context: Done())


def test_a_steps_own_trouble_with_files_is_not_taken_for_the_disks(tmp_path):
    def missing(step, inputs, out, context):
        (out / "none").read_text()
        return Done()

    def twice(step, inputs, out, context):
        (out / "sub").mkdir()
        (out / "sub").mkdir()
        return Done()

    for function, error in ((missing, FileNotFoundError), (twice, FileExistsError)):
        with pytest.raises(StepFailed) as caught:
            run_one(tmp_path, function)
        assert isinstance(caught.value.__cause__, error)
