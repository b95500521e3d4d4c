"""The whole plan on tiny random models: every table equals brute force on Hugging Face's own tensors.

The reference here knows nothing of `ingest.models`: it multiplies the checkpoint's matrices in float64, for
a Llama with grouped-query heads and random gains, its gated neurons and a random transcoder.
"""

import json
from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.numpy import load_file, save_file

from ingest.models import open_model
from ingest.rules import Rule, rule_from_data
from tests.workers.brute_force import Pair, chosen
from tests.workers.building import Built, build
from workers.heads import Head, Stacked, ThroughHead
from workers.sides import lengths

LAYERS, D, HEADS, KV, D_HEAD, D_MLP, VOCAB, LATENTS = 3, 32, 4, 2, 8, 24, 50, 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and a transcoder for each layer, one dead latent and two equal ones in each."""
    from transformers import LlamaConfig, LlamaForCausalLM

    where = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=D, intermediate_size=D_MLP, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV, max_position_embeddings=32,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (1.0 if parameter.ndim == 1 else 0.0))
    model.save_pretrained(where / "model")
    rng = np.random.default_rng(0)
    (where / "tc").mkdir()
    for layer in range(LAYERS):
        encoder, decoder = rng.standard_normal((2, LATENTS, D)) * np.exp(rng.standard_normal((2, LATENTS, 1)))
        decoder[4], decoder[9], encoder[9] = 0, decoder[2], encoder[2]
        tensors = {"W_enc": encoder, "W_dec": decoder, "b_enc": np.zeros(LATENTS), "b_dec": np.zeros(D)}
        save_file(
            {k: v.astype(np.float32) for k, v in tensors.items()}, where / "tc" / f"layer_{layer}.safetensors"
        )
    config_yaml = {
        "model_name": "tiny", "model_kind": "transcoder_set", "feature_input_hook": "mlp.hook_in",
        "feature_output_hook": "mlp.hook_out",
    }  # fmt: skip
    (where / "tc" / "config.yaml").write_text(yaml.safe_dump(config_yaml))
    return where


class Reference:
    """Writing and reading vectors, heads and embeddings, from the checkpoint's tensors."""

    def __init__(self, folder: Path) -> None:
        self.tensors = {
            k: v.astype(np.float64) for k, v in load_file(folder / "model" / "model.safetensors").items()
        }
        self.tc = [
            {k: v.astype(np.float64) for k, v in load_file(folder / "tc" / f"layer_{n}.safetensors").items()}
            for n in range(LAYERS)
        ]

    def layer(self, number: int, name: str) -> np.ndarray:
        return self.tensors[f"model.layers.{number}.{name}.weight"]

    def omega(self, kind: str, layer: int) -> np.ndarray:
        return self.layer(layer, "mlp.down_proj").T if kind == "n" else self.tc[layer]["W_dec"]

    def rho(self, kind: str, layer: int, reading: str) -> np.ndarray:
        gain = self.layer(layer, "post_attention_layernorm")
        rows = self.layer(layer, f"mlp.{reading}_proj") if kind == "n" else self.tc[layer]["W_enc"]
        return rows * gain

    def ov(self, layer: int, head: int) -> np.ndarray:
        kv = head // (HEADS // KV)
        w_v = self.layer(layer, "self_attn.v_proj")[kv * D_HEAD :][:D_HEAD].T
        w_o = self.layer(layer, "self_attn.o_proj")[:, head * D_HEAD :][:, :D_HEAD].T
        return np.diag(self.layer(layer, "input_layernorm")) @ w_v @ w_o

    def pairs(self, sources: list[str], kind: str, layer: int, types: tuple[str, ...]) -> Iterator[Pair]:
        """Every pair into one dictionary."""
        lower = [(name, at) for name in sources for at in range(LAYERS) if at < layer]
        readings = {"gate": 1, "up": 2} if kind == "n" else {"in": 0}
        for (reading, number), (place, (name, at)) in (
            (r, s) for r in readings.items() for s in enumerate(lower)
        ):
            omega, rho = self.omega(name, at), self.rho(kind, layer, reading)
            through: list[tuple[int, int, np.ndarray]] = [(-1, -1, omega)] if "DIRECT" in types else []
            if "VIA_HEAD" in types:
                heads = ((mid, head) for mid in range(at + 1, layer + 1) for head in range(HEADS))
                through += [(mid, head, omega @ self.ov(mid, head)) for mid, head in heads]
            scale = 1.0 if name == "n" else 1 / np.maximum(np.linalg.norm(omega, axis=1), 1e-300)
            own = np.linalg.norm(self.omega(kind, layer), axis=1)
            free = np.ones(len(rho)) if kind == "n" else np.where(own > 0, own, 1)
            for mid, head, passed in through:
                weight = (passed @ rho.T).astype(np.float32)
                length = np.linalg.norm(passed, axis=1)[:, None] * np.linalg.norm(rho, axis=1)
                z = np.divide(weight * np.sqrt(D), length, out=np.zeros(length.shape), where=length > 0)
                size = np.abs(weight.astype(np.float64)) * np.reshape(scale, (-1, 1)) * free
                for i, j in np.ndindex(*weight.shape):
                    yield Pair(
                        (place, i),
                        j,
                        number,
                        mid,
                        head,
                        at,
                        float(weight[i, j]),
                        float(z[i, j]),
                        float(size[i, j]),
                    )


@cache
def dictionary_names(built: Built) -> dict[str, tuple[str, int]]:
    return {found.hash_of(at): (name, at) for name, found in built.sets.items() for at in found.layers}


def stored(built: Built, kind: str, layer: int, sources: list[str]) -> dict[tuple, dict]:
    """identity -> row, of all kept pairs into one dictionary."""
    names = dictionary_names(built)
    lower = [(name, at) for name in sources for at in range(LAYERS) if at < layer]
    found = {}
    for table in ("DIRECT", "VIA_HEAD"):
        for row in built.table(table).to_pylist():
            if names[row["target_dictionary"]] == (kind, layer):
                source = (lower.index(names[row["source_dictionary"]]), row["source"])
                reading = ("in", "gate", "up").index(row["reading"])
                identity = (source, row["target"], reading, row.get("layer", -1), row.get("head", -1))
                assert identity not in found
                found[identity] = row
    return found


HEAD = "models: {m: {path: model}}\ndictionaries: {n: {model: m, format: neurons}, t: {model: m, path: tc}}\n"
KEEPS = [
    "{z: 2.2}",
    "{top: 3, per: target}",
    "{top: 1, per: target×head}",
    "{top: 2, per: target×source_layer}",
    "{top: 4, per: target×type}",
    "{top: 2, per: source}",
    "{absolute: 1.5}",
    "{top: 30, per: block}",
    "{any: [{z: 3}, {all: [{top: 50, per: block}, {z: 1.5}]}]}",
    "{any: [{z: 3}, {all: [{z: 1.5}, {top: 2, per: target}]}, {top: 1, per: source}]}",
    "{all: [{top: 6, per: source}, {top: 20, per: target}]}",
    "everything",
]


@pytest.mark.parametrize("keep", KEEPS)
def test_feature_edges_equal_brute_force(keep: str, folder: Path, tmp_path: Path) -> None:
    edges = f"edges: [{{types: [DIRECT, VIA_HEAD], keep: {keep}}}]\n"
    built = build(f"atlas: 1\n{HEAD}{edges}", folder, tmp_path)
    reference, sources = Reference(folder), ["n", "t"]
    rule: Rule = rule_from_data(yaml.safe_load(keep))
    total = 0
    targets = [(kind, layer) for kind in sources for layer in range(1, LAYERS)]
    everything = {
        target: list(reference.pairs(sources, *target, ("DIRECT", "VIA_HEAD"))) for target in targets
    }
    for target, keep_here in kept_by_target(rule, everything).items():
        found = stored(built, *target, sources)
        assert set(found) == set(keep_here)
        total += len(found)
        for identity, pair in keep_here.items():
            row = found[identity]
            assert row["weight"] == pair.weight
            assert row["z"] == pytest.approx(pair.z, rel=1e-6)
        check_ranks(found, "rank_in", lambda identity: (*identity[1:3], identity[4] >= 0))
    assert total > 20
    check_rank_out(built)


def kept_by_target(rule: Rule, pairs: dict[tuple[str, int], list[Pair]]) -> dict[tuple, dict[tuple, Pair]]:
    """Brute force over all targets at once: a rule per source sees them all, with sources named by
    dictionary."""
    where = {}
    joined = []
    for number, (target, found) in enumerate(pairs.items()):
        below = [(name, at) for name in ("n", "t") for at in range(LAYERS) if at < target[1]]
        for pair in found:
            name, at = below[pair.source[0]]
            renamed = Pair(
                (("n", "t").index(name) * LAYERS + at, pair.source[1]), number * 1000 + pair.target,
                pair.reading, pair.layer, pair.head, pair.source_layer, pair.weight, pair.z, pair.size,
            )  # fmt: skip
            where[renamed.identity] = (target, pair)
            joined.append(renamed)
    result: dict[tuple, dict[tuple, Pair]] = {target: {} for target in pairs}
    for identity in chosen(rule, joined):
        target, pair = where[identity]
        result[target][pair.identity] = pair
    return result


def check_ranks(found: dict[tuple, dict], column: str, group_of) -> None:
    groups: dict[tuple, list[tuple]] = {}
    for identity, row in found.items():
        groups.setdefault(group_of(identity), []).append((-abs(row["weight"]), identity, row[column]))
    for rows in groups.values():
        assert [rank for _, _, rank in sorted(rows)] == list(range(1, len(rows) + 1))


def check_rank_out(built: Built) -> None:
    for table in ("DIRECT", "VIA_HEAD"):
        groups: dict[tuple, list[tuple[float, int]]] = {}
        for row in built.table(table).to_pylist():
            group = (row["source_dictionary"], row["source"], row["reading"])
            groups.setdefault(group, []).append((abs(row["weight"]), row["rank_out"]))
        for rows in groups.values():
            by_rank = sorted(rows, key=lambda row: row[1])
            assert [rank for _, rank in by_rank] == list(range(1, len(rows) + 1))
            assert [weight for weight, _ in by_rank] == sorted((weight for weight, _ in rows), reverse=True)


def test_token_edges_equal_brute_force(folder: Path, tmp_path: Path) -> None:
    built = build(
        f"atlas: 1\n{HEAD}edges: [{{types: [EMBEDS, PROMOTES], keep: {{top: 3}}}}]\n", folder, tmp_path
    )
    reference, names = Reference(folder), dictionary_names(built)
    embedding, unembedding = (
        reference.tensors["model.embed_tokens.weight"],
        reference.tensors["lm_head.weight"],
    )
    gain = reference.tensors["model.norm.weight"]
    found: dict[tuple, list[tuple]] = {}
    for table, side in (("EMBEDS", "target"), ("PROMOTES", "source")):
        for row in built.table(table).to_pylist():
            at = (table, *names[row[f"{side}_dictionary"]], row[side], row.get("reading", ""))
            found.setdefault(at, []).append((row["weight"] < 0, row["rank"], row["token"], row["weight"]))
    for kind in ("n", "t"):
        for layer in range(LAYERS):
            tables = {
                ("PROMOTES", ""): reference.omega(kind, layer) * gain @ (unembedding - unembedding.mean(0)).T
            }
            for reading in ("gate", "up") if kind == "n" else ("in",):
                tables["EMBEDS", reading] = reference.rho(kind, layer, reading) @ embedding.T
            for (table, reading), weights in tables.items():
                for j, row in enumerate(weights.astype(np.float32)):
                    best = sorted((-abs(w), t) for t, w in enumerate(row.tolist()) if w > 0)[:3]
                    worst = sorted((-abs(w), t) for t, w in enumerate(row.tolist()) if w < 0)[:3]
                    want = [(False, n + 1, t, -w) for n, (w, t) in enumerate(best)]
                    want += [(True, n + 1, t, w) for n, (w, t) in enumerate(worst)]
                    got = sorted(found.get((table, kind, layer, j, reading), []))
                    assert [g[:3] for g in got] == [w[:3] for w in want]
                    assert [g[3] for g in got] == pytest.approx([w[3] for w in want], rel=1e-6)


def test_survey_counts_every_pair_and_sums_what_is_there(folder: Path, tmp_path: Path) -> None:
    """Blocks this small are read whole: the survey is exact."""
    keep = "edges: [{types: [DIRECT], from: [n], to: [n], keep: {z: 2}}]\n"
    built = build(f"atlas: 1\n{HEAD}{keep}", folder, tmp_path)
    reference = Reference(folder)
    rows = [
        row
        for path in built.artifacts.root.rglob("figures.json")
        for row in json.loads(path.read_text()).get("survey", [])
        if row["head"] < 0
    ]
    names = dictionary_names(built)
    for row in rows:
        if "source" not in row or names[row["source"]][0] != "n" or names[row["target"]] != ("n", 2):
            continue
        omega = reference.omega("n", names[row["source"]][1])
        weight = np.concatenate(
            [omega @ reference.rho("n", 2, reading).T for reading in ("gate", "up")], axis=1
        )
        assert row["pairs"] == row["sampled"] == weight.size
        assert row["total"] == pytest.approx(np.abs(weight).sum(), rel=1e-4)
        assert sum(row["histogram"].values()) == weight.size
    assert rows


def test_the_bound_on_a_head_product_holds_and_is_close(folder: Path) -> None:
    """The float64 route through the head's QR factors stays within its bound; were the bound loose, thousands
    of weights would be computed again in slow arithmetic."""
    model = open_model(folder / "model", name="m")
    reference = Reference(folder)
    omega, rho = reference.omega("t", 0), reference.rho("t", 2, "in")
    for number in range(HEADS):
        head = Head.of(model, 1, number)
        s = model.attention_input(1, torch.from_numpy(omega)).numpy()
        stacked = Stacked(
            [], np.array([0, len(s)]), lengths(s), np.ones(len(s)), {0: s @ head.w_v}, lambda i, s=s: s[i]
        )
        through = ThroughHead(head, 0, stacked)
        b = rho @ head.q
        row, column = (x.ravel() for x in np.indices((len(b), len(s))))
        error = through.error(row, column, b, lengths(rho))
        for n in range(0, len(row), 7):
            exact = exact_head_product(s[column[n]], head, rho[row[n]])
            off = abs(Fraction(float(through.a[column[n]] @ b[row[n]])) - exact)
            assert off <= Fraction(float(error[n]))
        assert np.median(error / np.maximum(lengths(through.a)[column] * lengths(rho)[row], 1e-30)) < 1e-13


def exact_head_product(s: np.ndarray, head: Head, rho: np.ndarray) -> Fraction:
    def dot(x: np.ndarray, y: np.ndarray) -> Fraction:
        return sum((Fraction(float(a)) * Fraction(float(b)) for a, b in zip(x, y, strict=True)), Fraction(0))

    return sum((dot(s, v) * dot(o, rho) for v, o in zip(head.w_v.T, head.w_o, strict=True)), Fraction(0))
