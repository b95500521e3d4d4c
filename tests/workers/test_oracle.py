"""The stored weights reproduce the attribution graphs of an independent implementation (methods §3)."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.workers.building import Built, build

ORACLE = Path(__file__).parents[3] / "shared" / "oracle"


@pytest.fixture(params=["gpt2", "llama"])
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Built, dict[str, np.ndarray]]:
    folder = ORACLE / request.param
    if not folder.is_dir():
        pytest.skip("the oracle's folder is not beside the repository")
    text = f"""
    atlas: 1
    models: {{m: {{path: "{folder / "model"}"}}}}
    dictionaries: {{tc: {{model: m, path: "{folder / "transcoders"}"}}}}
    edges:
      - {{types: [DIRECT, VIA_HEAD], keep: everything}}
    """
    return build(text, tmp_path), load_file(folder / "expected.safetensors")


def matrices(built: Built, table: str) -> dict[tuple[int, int, int, int], np.ndarray]:
    """(source layer, target layer, head's layer, head) -> V (sources, targets); head -1 for DIRECT."""
    found = built.sets["tc"]
    layer_of = {found.hash_of(layer): layer for layer in found.layers}
    rows = built.table(table).to_pylist()
    result: dict[tuple[int, int, int, int], np.ndarray] = {}
    for row in rows:
        source, target = layer_of[row["source_dictionary"]], layer_of[row["target_dictionary"]]
        key = (source, target, row.get("layer", -1), row.get("head", -1))
        matrix = result.setdefault(key, np.zeros((found.sizes[source], found.sizes[target])))
        matrix[row["source"], row["target"]] = row["weight"]
    return result


def test_adjacent_layers_reproduce_the_adjacency(case: tuple[Built, dict[str, np.ndarray]]) -> None:
    built, expected = case
    model = built.models["m"]
    trace = model.trace(expected["tokens"].tolist())
    direct, via = matrices(built, "DIRECT"), matrices(built, "VIA_HEAD")
    features, activation = expected["active_features"], expected["activation_values"]
    pattern, sigma1, sigma2 = (x.double().numpy() for x in (trace.pattern, trace.sigma1, trace.sigma2))
    assert np.allclose(sigma2, expected["ln2_scale"], rtol=1e-5)
    checked = largest = 0
    for t, (m, target_at, j) in enumerate(features):
        for s, (layer, source_at, i) in enumerate(features):
            if m != layer + 1 or source_at > target_at:
                continue
            edge = direct[layer, m, -1, -1][i, j] / sigma2[m, target_at] if source_at == target_at else 0.0
            for h in range(model.facts.n_heads):
                share = pattern[m, h, target_at, source_at] / (sigma1[m, source_at] * sigma2[m, target_at])
                edge += share * via[layer, m, m, h][i, j]
            assert activation[s] * edge == pytest.approx(expected["adjacency"][t, s], abs=1e-5)
            checked += 1
            largest = max(largest, abs(expected["adjacency"][t, s]))
    assert checked > 500 and largest > 1e-2


def test_heads_stand_between_source_and_target(case: tuple[Built, dict[str, np.ndarray]]) -> None:
    built, _ = case
    keys = set(matrices(built, "VIA_HEAD"))
    heads = range(built.models["m"].facts.n_heads)
    assert keys == {
        (source, target, layer, head)
        for source in range(3)
        for target in range(3)
        for layer in range(source + 1, target + 1)
        for head in heads
    }
