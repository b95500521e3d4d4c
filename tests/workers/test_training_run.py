"""Training runs on a tiny model: the stream gives what the model computes, a stopped run ends as one that was
not, what is written is what was trained, and it explains the MLP better than chance."""

import dataclasses

import numpy as np
import pytest
import torch

from ingest.contexts import make_contexts
from ingest.corpora import open_corpus
from ingest.dictionaries import At, Read, Space
from ingest.dictionaries.encode import decode, encode
from ingest.errors import InputError
from ingest.models import open_model
from ingest.models.capture import capture
from tests.ingest.tiny_models import tiny_model
from workers.training.coder import BatchTopKGate, JumpReLUGate, ReLUGate, TopKGate
from workers.training.run import TrainingPlan, train
from workers.training.stream import Harvest, Stream
from workers.training.trainee import Job, Trainee

torch.set_num_threads(1)
MLP_IN, OUT = Read("mlp.in", Space.NORMALISED_WITH_GAIN), ("mlp", At.MODULE)
MLP_OUT = Read("mlp.out", Space.BRANCH_OUTPUT)
JOBS = (
    Job("tc", 1, MLP_IN, OUT, 48, TopKGate(6), rate=5e-3),
    Job("skip", 2, MLP_IN, OUT, 48, BatchTopKGate(6), skip=True, rate=5e-3),
    Job("sae", 1, MLP_OUT, None, 48, JumpReLUGate(6), rate=5e-3),
    Job("relu", 0, Read("resid_post", Space.RAW), None, 48, ReLUGate(1e-3), rate=5e-3, optimiser="muon"),
)
PLAN = TrainingPlan(
    JOBS, tokens=6000, reuse=4, buffer=2400, batch=200, revive_after=3000, contexts_at_once=32
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    tiny_model("llama").save_pretrained(folder)
    return open_model(folder, check=False)


@pytest.fixture(scope="module")
def contexts(tmp_path_factory):
    file = tmp_path_factory.mktemp("tokens") / "tokens.npy"
    np.save(file, np.random.default_rng(0).integers(1, 61, (400, 13)))
    return make_contexts(open_corpus(file), None, pad=None, first=0, length=14, part="train")


def test_the_stream_gives_every_scored_token_once_and_mixes_them(model, contexts):
    sources = tuple(dict.fromkeys(source for job in JOBS for source in job.sources))
    harvest = Harvest(model, contexts, sources, batch=7, extreme=float("inf"))
    rows = harvest.rows(3, 13)
    assert rows.count == 10 * 13  # the first token of each is not scored
    ids = torch.from_numpy(contexts.tokens[3:13].astype(np.int64))
    found = capture(model, ids, [(1, MLP_IN)], [(1, *OUT)])
    assert torch.allclose(rows.values[1, MLP_IN], found.inputs[1, MLP_IN][:, 1:].flatten(0, 1), atol=1e-5)
    assert torch.allclose(rows.values[1, *OUT], found.outputs[1, *OUT][:, 1:].flatten(0, 1), atol=1e-5)
    stream = Stream(harvest, half=10, seed=5)
    stream.prepare(0)
    batches = list(stream.batches(0, size=26, reuse=2))
    met = [
        tuple(row) for batch in batches for half, which in batch for row in ((half, int(i)) for i in which)
    ]
    assert len(batches) == 10 and sorted(met) == [(half, row) for half in (0, 1) for row in range(130)]
    assert all(len(which) for batch in batches for _, which in batch)  # both halves in every batch
    again = Stream(harvest, half=10, seed=5)
    again.prepare(0)
    for one, other in zip(batches, again.batches(0, size=26, reuse=2), strict=True):
        assert all(torch.equal(a[1], b[1]) for a, b in zip(one, other, strict=True))


def test_beyond_the_last_context_come_the_first_ones(model, contexts):
    harvest = Harvest(model, contexts, ((1, MLP_IN),), extreme=float("inf"))
    around = harvest.rows(len(contexts) - 1, len(contexts) + 1).values[1, MLP_IN]
    assert torch.allclose(around[13:], harvest.rows(0, 1).values[1, MLP_IN], atol=1e-5)


def test_rows_of_extreme_size_are_left_out(model, contexts):
    harvest = Harvest(model, contexts, ((1, *OUT),), extreme=float("inf"))
    every = harvest.rows(0, 40).values[1, *OUT]
    size = (every - every.mean(0)).norm(dim=-1)
    bound = float(size.sort().values[-10] / size.median())
    kept = dataclasses.replace(harvest, extreme=bound).rows(0, 40).values[1, *OUT]
    assert torch.equal(kept, every[size <= bound * size.median()]) and len(kept) == len(every) - 9


@pytest.fixture(scope="module")
def undisturbed(model, contexts):
    return train(model, contexts, PLAN)


def test_what_is_trained_beats_where_it_began(model, contexts, undisturbed):
    assert undisturbed.met == pytest.approx(PLAN.tokens * PLAN.reuse - 1200 * PLAN.reuse, rel=0.2)
    sources = tuple(dict.fromkeys(source for job in JOBS for source in job.sources))
    rows = Harvest(model, contexts, sources, extreme=float("inf")).rows(0, 60).values
    for trainee in undisturbed.trainees:
        x, y = (rows[source] for source in trainee.job.sources)
        begun = Trainee(trainee.job, x, y)
        errors = []
        for one in (begun, trainee):
            dictionary = one.dictionary()
            activations = encode(dictionary, x)
            left = (y - decode(dictionary, activations, x)[0]).pow(2).sum() / (y - y.mean(0)).pow(2).sum()
            errors.append(float(left))
        assert errors[1] < 0.75 * errors[0], (trainee.job.set, errors)
        norms = dictionary.writes[0].W_dec.norm(dim=-1)
        assert torch.allclose(norms, torch.ones_like(norms), atol=1e-5)


def test_the_dictionary_is_the_coder_in_raw_units(model, contexts, undisturbed):
    """The finished dictionary's own formula on raw rows, against the coder's on scaled ones."""
    sources = tuple(dict.fromkeys(source for job in JOBS for source in job.sources))
    rows = Harvest(model, contexts, sources, extreme=float("inf")).rows(0, 20).values
    for trainee in undisturbed.trainees:
        x = rows[trainee.job.sources[0]].double()
        coder, dictionary = trainee.coder, trainee.dictionary()
        scaled = (x - trainee.mean_x) / trainee.scale_x
        p = scaled @ coder.W_enc.double().T + coder.b_enc
        match coder.gate:
            case TopKGate(k=k):
                a = torch.zeros_like(p).scatter(-1, p.topk(k).indices, 1.0) * p.relu()
            case BatchTopKGate():
                a = p * (p > coder.batch_threshold)
            case JumpReLUGate():
                a = p * (p > coder.log_threshold.double().exp())
            case ReLUGate():
                a = p.relu()
        out = a @ coder.W_dec.double() + coder.b_dec
        if coder.W_skip is not None:
            out = out + scaled @ coder.W_skip.double()
        activations = encode(dictionary, x)
        assert torch.allclose(activations, a * trainee.scale_y, rtol=1e-4, atol=1e-4)
        expected = out * trainee.scale_y + trainee.mean_y
        assert torch.allclose(decode(dictionary, activations, x)[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("after", [1, 2])
def test_a_run_that_was_stopped_ends_as_one_that_was_not(model, contexts, undisturbed, tmp_path, after):
    class Stop(Exception):
        pass

    checkpoint, rounds = tmp_path / "checkpoint.pt", []

    def stop(progress):
        if checkpoint.exists() and checkpoint.stat().st_mtime_ns not in rounds:
            rounds.append(checkpoint.stat().st_mtime_ns)
            if len(rounds) == after:
                raise Stop

    with pytest.raises(Stop):
        train(model, contexts, PLAN, checkpoint, stop, every=0, tell_every=0)
    told = []
    resumed = train(
        model, contexts, dataclasses.replace(PLAN, threads=2), checkpoint, told.append, every=0, tell_every=0
    )
    assert told[0].rows > 0 and all(one.rows_per_second >= 0 for one in told)
    assert resumed.met == undisturbed.met and resumed.harvested == undisturbed.harvested
    for one, other in zip(resumed.trainees, undisturbed.trainees, strict=True):
        for name, parameter in other.coder.parameters().items():
            assert torch.allclose(one.coder.parameters()[name], parameter, rtol=1e-4, atol=1e-5), name
    # And once more, from the checkpoint of the end: nothing is left to do.
    finished = train(model, contexts, PLAN, checkpoint)
    assert finished.met == undisturbed.met


def test_the_rate_has_fallen_to_nothing_at_the_last_step(model, contexts, monkeypatch):
    """Also where a round is no whole number of batches."""
    factors, step = [], Trainee.step
    monkeypatch.setattr(Trainee, "step", lambda self, x, y, factor, revive: (
        factors.append(factor), step(self, x, y, factor, revive))[1])  # fmt: skip
    train(model, contexts, dataclasses.replace(PLAN, jobs=JOBS[:1], batch=900, reuse=1.6))
    assert len(factors) > 5 and max(factors) == 1.0 and factors[-1] <= 1 / len(factors) / PLAN.fall + 1e-6


def test_a_job_may_wait_longer_than_the_others_before_its_latents_begin_anew(model, contexts, monkeypatch):
    waits = set()
    step = Trainee.step
    monkeypatch.setattr(Trainee, "step", lambda self, x, y, factor, revive: (
        waits.add((self.job.name, revive)), step(self, x, y, factor, revive))[1])  # fmt: skip
    patient = dataclasses.replace(JOBS[1], revive_after=9000)
    train(model, contexts, dataclasses.replace(PLAN, jobs=(JOBS[0], patient)))
    assert waits == {("tc/L01", None), ("tc/L01", 3000), ("skip/L02", None), ("skip/L02", 9000)}


def test_a_checkpoint_of_another_run_is_refused(model, contexts, tmp_path):
    checkpoint = tmp_path / "checkpoint.pt"
    small = dataclasses.replace(PLAN, jobs=JOBS[:1], tokens=1200)
    train(model, contexts, small, checkpoint, every=0)
    with pytest.raises(InputError, match="of another run"):
        train(model, contexts, dataclasses.replace(small, batch=100), checkpoint)
    checkpoint.write_bytes(b"no checkpoint")
    with pytest.raises(InputError, match="cannot be read as a checkpoint"):
        train(model, contexts, small, checkpoint)


def test_a_checkpoint_of_other_tokens_of_the_same_documents_is_refused(model, contexts, tmp_path):
    checkpoint = tmp_path / "checkpoint.pt"
    small = dataclasses.replace(PLAN, jobs=JOBS[:1], tokens=1200, buffer=1000)
    train(model, contexts, small, checkpoint, every=0)
    for other in ({"tokens": contexts.tokens[:, ::-1].copy()}, {"pad": 3}):
        with pytest.raises(InputError, match="is of another run"):
            train(model, dataclasses.replace(contexts, **other), small, checkpoint)
