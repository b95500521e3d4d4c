"""Examples of features against a plain search through every token."""

import numpy as np
import pytest
import torch

from ingest.contexts import Contexts
from ingest.dictionaries import Read, Space, open_set
from ingest.dictionaries.encode import encode
from ingest.models import open_model
from ingest.models.capture import capture
from tests.ingest.small_dictionaries import tensors, write_set
from tests.ingest.tiny_models import tiny_model
from workers import examples
from workers.examples import examples_of, peaks_of

torch.set_num_threads(1)


@pytest.mark.parametrize("batch", [20, 10_000])
def test_the_strongest_contexts_of_each_feature_and_what_stands_around(tmp_path, monkeypatch, batch):
    monkeypatch.setattr(examples, "BATCH_TOKENS", batch)
    tiny_model("llama").save_pretrained(tmp_path / "model")
    model = open_model(tmp_path / "model", check=False)
    values = {layer: tensors(layer, 12, 32, threshold=True) for layer in (0, 2)}
    values[0]["b_enc"][3] = -1e6  # dead
    found = open_set(write_set(tmp_path / "tc", values), name="tc", model=model)
    rows = np.random.default_rng(0).integers(1, 61, (17, 10)).astype(np.int32)
    rows[:, 8:] = 60
    contexts = Contexts(rows, np.arange(17), tuple(map(str, range(17))), 1, pad=60)
    loaded = [found.load(layer) for layer in found.layers]
    peaks = peaks_of(model, loaded, contexts, 4)
    chosen = [[0, 5], [7]]
    shown = examples_of(model, loaded, contexts, peaks, chosen)
    assert set(shown) == {(0, 0), (0, 5), (1, 7)}
    read = Read("mlp.in", Space.NORMALISED_WITH_GAIN)
    scored = torch.from_numpy(contexts.scored(rows))
    for at, dictionary in enumerate(loaded):
        x = capture(model, torch.from_numpy(rows).long(), [(dictionary.layer, read)]).inputs[
            dictionary.layer, read
        ]
        acts = torch.where(scored[..., None], encode(dictionary, x), 0.0)
        best, where = acts.max(1)  # (17, F)
        order = best.sort(dim=0, descending=True, stable=True).indices[:4]
        assert np.allclose(peaks[at].value, best.gather(0, order).T, rtol=1e-4, atol=1e-6)
        assert np.array_equal(peaks[at].contexts, (best > 0).sum(0))
        assert set(peaks[at].live) == set(torch.nonzero(best.max(0).values > 0).flatten().tolist())
        for feature in chosen[at]:
            for rank, one in enumerate(shown[at, feature]):
                context = int(order[rank, feature])
                assert np.array_equal(one.tokens, rows[context])
                assert np.allclose(one.activations, acts[context, :, feature], rtol=1e-4, atol=1e-5)
                assert one.peak == int(where[context, feature])
                assert one.activations[0] == one.activations[9] == 0
    assert 3 not in peaks[0].live
