"""`atlas train`, killed at any moment, ends by the same command as one that was left alone, file for file."""

import random
import shutil

import numpy as np
import pytest

import atlas.training
from tests.atlas.program import Program
from tests.atlas.tiny_source import write_model
from tests.workers.killing import files_of

SPEC = """train: 1
model: model
corpus: ids.npy
tokens: 6000
reuse: 2
buffer: 800
batch: 100
dictionaries:
  tc: {reads: mlp.in, writes: mlp.out, layers: [0, 2], latents: 40, gate: {topk: 5}, precision: float16}
  sae: {reads: resid_post, layers: [1], latents: 40, gate: {batchtopk: 5}}
"""
KILLS = 5


def keep_every_round():
    """In the program's own process: a checkpoint after every round, not one a minute."""
    ours = atlas.training.run_training

    def every_round(*given, **named):
        return ours(*given, **{**named, "every": 0.0})

    atlas.training.run_training = every_round


def train(place, out, said=None):
    return Program(
        "train", place / "spec.yaml", "--out", out, "--threads", "1", said=said, first=keep_every_round
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("train")
    write_model(folder / "model")
    np.save(folder / "ids.npy", np.random.default_rng(0).integers(0, 50, (900, 12)))
    (folder / "spec.yaml").write_text(SPEC)
    return folder


def test_a_training_killed_again_and_again_ends_as_one_left_alone(place, tmp_path):
    said, out = tmp_path / "said.txt", tmp_path / "killed"
    assert train(place, tmp_path / "alone", said).wait(120) == 0, said.read_text()
    moments = random.Random(5)
    killed = []
    while len(killed) < KILLS:
        running = train(place, out, said)
        before = written(out)
        while running.wait(0.01) is None and written(out) == before:
            pass  # until it has kept something
        if running.wait(moments.uniform(0, 0.25)) is None:
            running.kill()
            killed.append(sorted(path.name for path in out.iterdir()))
            for name in {"tc", "sae"} & set(killed[-1]):  # a set is there whole or not at all
                assert (out / name / "training.json").is_file()
        else:
            shutil.rmtree(out)  # it was through: once more from the beginning
    assert any("checkpoint.pt" in names for names in killed)
    assert train(place, out, said).wait(120) == 0, said.read_text()
    assert weights(out) == weights(tmp_path / "alone") and len(weights(out)) >= 4


def written(out):
    """When something was last kept."""
    return max((path.stat().st_mtime_ns for path in out.glob("*")), default=0)


def weights(out):
    """Every file but the records, which tell how long it took."""
    return {name: content for name, content in files_of(out).items() if not name.endswith("training.json")}
