"""The whole plan on a tiny random model of each shape of residual stream: all its edges equal plain matrix
products (`tests.workers.streams`), and no others exist."""

from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.numpy import save_file

from ingest.rules import rule_from_data
from tests.ingest.tiny_models import tiny_model
from tests.workers.brute_force import Pair, chosen
from tests.workers.building import Built, build
from tests.workers.streams import HEADS, LAYERS, STREAMS, D, Stream, stream_of

D_MLP, VOCAB = 40, 61
READINGS = ("in", "gate", "up")
SLOTS = 1 + LAYERS * HEADS  # the direct path, then every head


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All the models, as Hugging Face saves them."""
    where = tmp_path_factory.mktemp("architectures")
    torch.set_num_threads(1)
    for name in STREAMS:
        tiny_model(name, **({"n_inner": D_MLP} if name == "gpt2" else {})).save_pretrained(where / name)
    return where


# --- the edges there must be --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Features:
    """The features of one layer in the residual basis: ω (F, d) and, for each reading, ρ (F, d)."""

    layer: int
    omega: np.ndarray
    rho: dict[str, np.ndarray]
    rescalable: bool = False


AllFeatures = dict[tuple[str, int], Features]  # by set and layer


def neurons(stream: Stream, rescalable: bool) -> AllFeatures:
    return {
        ("n", n): Features(
            n,
            block.W_out @ block.behind_mlp,
            {r: e @ block.mlp_norm.T for r, e in block.W_in.items()},
            rescalable,
        )
        for n, block in enumerate(stream.blocks)
    }


def feature_edges(stream: Stream, features: AllFeatures) -> tuple[np.ndarray, np.ndarray]:
    """Weight (float32) and z (float64) of every pair, [source set and layer, target's, reading, slot, i, j];
    NaN where there is none."""
    count, size = len(features), len(next(iter(features.values())).omega)
    shape = (count, count, len(READINGS), SLOTS, size, size)
    weights, zs = np.full(shape, np.nan, np.float32), np.full(shape, np.nan)
    for (s, source), (t, target) in product(enumerate(features.values()), enumerate(features.values())):
        if source.layer >= target.layer:
            continue
        arriving = {0: source.omega}
        # In a parallel block the MLP reads what its own layer's attention reads, not what that writes.
        for middle in range(source.layer + 1, target.layer + (0 if stream.parallel else 1)):
            block = stream.blocks[middle]
            for head, W_O in enumerate(block.W_O):
                W_V = block.W_V[head * len(block.W_V) // HEADS]
                OV = block.attention_norm @ W_V @ W_O @ block.behind_attention
                arriving[1 + middle * HEADS + head] = source.omega @ OV
        for (reading, rho), (slot, omega) in product(target.rho.items(), arriving.items()):
            at = s, t, READINGS.index(reading), slot
            weights[at] = omega @ rho.T
            zs[at] = weights[at] * D**0.5 / np.outer(*(np.linalg.norm(x, axis=1) for x in (omega, rho)))
    return weights, zs


def stored_edges(built: Built, features: AllFeatures) -> tuple[np.ndarray, np.ndarray]:
    """The same from the tables."""
    place = {built.sets[name].hash_of(layer): n for n, (name, layer) in enumerate(features)}
    assert len(place) == len(features)
    size = len(next(iter(features.values())).omega)
    shape = (len(features), len(features), len(READINGS), SLOTS, size, size)
    weights, zs = np.full(shape, np.nan, np.float32), np.full(shape, np.nan)
    for table in ("DIRECT", "VIA_HEAD"):
        rows = built.table(table)
        column = {name: rows[name].to_numpy() for name in rows.column_names}
        slot = (
            1 + column["layer"] * HEADS + column["head"] if table == "VIA_HEAD" else np.zeros(len(rows), int)
        )
        at = (
            np.array([place[x] for x in column["source_dictionary"]], int),
            np.array([place[x] for x in column["target_dictionary"]], int),
            np.array([READINGS.index(x) for x in column["reading"]], int),
            slot, column["source"], column["target"],
        )  # fmt: skip
        assert len(np.unique(np.ravel_multi_index(at, shape))) == len(rows)  # no edge twice
        weights[at], zs[at] = column["weight"], column["z"]
    return weights, zs


def check_weights(got: np.ndarray, want: np.ndarray) -> None:
    """The same pairs, the same float32 numbers: but for at most three, off by one step, whose float64 sums
    were taken in another order on a midpoint's edge."""
    assert (np.isnan(got) == np.isnan(want)).all()
    there = ~np.isnan(want)
    got, want = got[there], want[there]
    off = np.abs(got.astype(np.float64) - want)
    assert (off <= np.spacing(np.abs(want))).all()
    assert np.count_nonzero(off) <= 3


def ruled(keep: str, features: AllFeatures, weights: np.ndarray, zs: np.ndarray) -> np.ndarray:
    """Mask of the pairs that a rule keeps, by the plain statement of the rules."""
    lengths = [np.linalg.norm(f.omega, axis=1) if f.rescalable else np.ones(len(f.omega)) for f in
               features.values()]  # fmt: skip
    layer_of = [f.layer for f in features.values()]
    pairs = [
        Pair(
            (s, i), 1000 * t + j, reading, *(divmod(slot - 1, HEADS) if slot else (-1, -1)), layer_of[s],
            float(weights[s, t, reading, slot, i, j]), float(zs[s, t, reading, slot, i, j]),
            abs(float(weights[s, t, reading, slot, i, j])) / lengths[s][i] * lengths[t][j],
        )
        for s, t, reading, slot, i, j in np.argwhere(~np.isnan(weights)).tolist()
    ]  # fmt: skip
    kept = np.zeros(weights.shape, bool)
    for (s, i), target, reading, layer, head in chosen(rule_from_data(yaml.safe_load(keep)), pairs):
        slot = 0 if head < 0 else 1 + layer * HEADS + head
        kept[s, target // 1000, reading, slot, i, target % 1000] = True
    return kept


def token_edges(stream: Stream, features: AllFeatures) -> dict[tuple, np.ndarray]:
    """(table, set, layer, reading) -> (F, vocabulary) float32; NaN where a weight is zero, which is no edge
    (OPT's padding token is a row of zeros)."""
    logits = stream.logits - stream.logits.mean(axis=0)
    found = {}
    for (name, layer), feature in features.items():
        found["PROMOTES", name, layer, ""] = feature.omega @ stream.final_norm @ logits.T
        for reading, rho in feature.rho.items():
            found["EMBEDS", name, layer, reading] = rho @ stream.tokens.T
    return {key: np.where(w == 0, np.nan, w).astype(np.float32) for key, w in found.items()}


def stored_token_edges(built: Built, features: AllFeatures) -> dict[tuple, np.ndarray]:
    place = {built.sets[name].hash_of(layer): (name, layer) for name, layer in features}
    size = len(next(iter(features.values())).omega)
    found: dict[tuple, np.ndarray] = {}
    for table, side in (("EMBEDS", "target"), ("PROMOTES", "source")):
        for row in built.table(table).to_pylist():
            key = (table, *place[row[f"{side}_dictionary"]], row.get("reading", ""))
            weights = found.setdefault(key, np.full((size, VOCAB), np.nan, np.float32))
            assert np.isnan(weights[row[side], row["token"]])
            weights[row[side], row["token"]] = row["weight"]
    return found


ALL_EDGES = f"""edges:
  - {{types: [DIRECT, VIA_HEAD], keep: everything}}
  - {{types: [EMBEDS, PROMOTES], keep: {{top: {VOCAB}}}}}
"""
BEST = "{any: [{top: 3, per: target}, {top: 1, per: target×head}, {z: 3.5}]}"
BEST_EDGES = f"edges: [{{types: [DIRECT, VIA_HEAD], keep: {BEST}}}]\n"


def check_everything(head: str, folder: Path, out: Path, stream: Stream, features: AllFeatures) -> None:
    """A build that keeps every edge against the algebra. head: the spec's models and dictionaries."""
    built = build(f"atlas: 1\n{head}{ALL_EDGES}", folder, out / "all")
    weights, zs = feature_edges(stream, features)
    got_weights, got_zs = stored_edges(built, features)
    check_weights(got_weights, weights)
    np.testing.assert_allclose(got_zs, zs, rtol=1e-6)
    want, got = token_edges(stream, features), stored_token_edges(built, features)
    assert set(got) == set(want)
    for key in want:
        check_weights(got[key], want[key])


def check_best(head: str, folder: Path, out: Path, stream: Stream, features: AllFeatures) -> None:
    """A build that keeps the best edges against the rule, plainly."""
    built = build(f"atlas: 1\n{head}{BEST_EDGES}", folder, out / "best")
    weights, zs = feature_edges(stream, features)
    kept = ruled(BEST, features, weights, zs)
    assert 0 < kept.sum() < np.count_nonzero(~np.isnan(weights)) / 2
    check_weights(stored_edges(built, features)[0], np.where(kept, weights, np.float32(np.nan)))


@pytest.mark.parametrize("name", STREAMS)
def test_neurons_equal_the_algebra_of_their_architecture(name: str, folder: Path, tmp_path: Path) -> None:
    stream = stream_of(name, folder / name)
    head = f"models: {{m: {{path: {name}}}}}\ndictionaries: {{n: {{model: m, format: neurons}}}}\n"
    features = neurons(stream, rescalable=name == "opt")  # ReLU(c x) = c ReLU(x) for c > 0
    check_everything(head, folder, tmp_path, stream, features)
    check_best(head, folder, tmp_path, stream, features)


@pytest.mark.parametrize("name", ["gemma2", "granite"])
def test_what_stands_behind_the_mlp_is_folded_only_where_a_transcoder_writes_at_the_module(
    name: str, folder: Path, tmp_path: Path
) -> None:
    """The same tensors twice, written at the MLP's output and at what joins the stream: two dictionaries."""
    stream, size, rng = stream_of(name, folder / name), 16, np.random.default_rng(1)
    hooks = {"module": "mlp.hook_out", "stream": "hook_mlp_out"}
    for where, hook in hooks.items():
        (tmp_path / where).mkdir()
        (tmp_path / where / "config.yaml").write_text(
            yaml.safe_dump({"feature_input_hook": "mlp.hook_in", "feature_output_hook": hook})
        )
    features: AllFeatures = {}
    for layer, block in enumerate(stream.blocks):
        W_enc, W_dec = (rng.standard_normal((2, size, D)) * np.exp(rng.standard_normal((2, size, 1)))).astype(
            np.float32
        )
        tensors = {"W_enc": W_enc, "W_dec": W_dec, "b_enc": W_enc[:, 0].copy(), "b_dec": W_dec[0].copy()}
        rho = {"in": W_enc.astype(np.float64) @ block.mlp_norm.T}
        joined = {"module": W_dec.astype(np.float64) @ block.behind_mlp, "stream": W_dec.astype(np.float64)}
        for where, omega in joined.items():
            save_file(tensors, tmp_path / where / f"layer_{layer}.safetensors")
            features[where, layer] = Features(layer, omega, rho, rescalable=True)
    sets = ", ".join(f"{where}: {{model: m, path: {tmp_path / where}}}" for where in hooks)
    head = f"models: {{m: {{path: {name}}}}}\ndictionaries: {{{sets}}}\n"
    check_everything(head, folder, tmp_path, stream, features)
    if name != "granite":  # a mere multiplier cancels in sizes: the two sets would tie but for rounding
        check_best(head, folder, tmp_path, stream, features)
