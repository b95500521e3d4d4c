"""Edges of the weight graph against the running model: with all else frozen, what a latent writes moves what
another reads by exactly its edge, over the frozen scales and through the frozen pattern."""

from collections.abc import Callable
from functools import cache

import pytest
import torch

from ingest.models import ResidualModel, Trace, Write
from tests.ingest.tiny_models import tiny_model, tokens
from tests.workers.building import Built, build
from tests.workers.sites import Random, write_cross_layer, write_sae
from tests.workers.streams import HEADS, LAYERS, D

MODELS = {"qwen3": 12, "gemma2": 12, "gpt_neox-parallel": 8}  # to d_head
HOOKS = {"att": "hook_attn_out", "mod": "attn.hook_out", "z": "attn.hook_z", "post": "hook_resid_post"}
SOURCE, READER, AT, TO = 2, 1, 3, 6  # latents; tokens written at and read at
STRENGTH = 3.0


WITH_CROSS_LAYER = [name for name in MODELS if name != "gemma2"]  # behind norms it has no weights


@pytest.fixture(scope="module")
def building(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Built]:
    """Of a model: all edges between one set of each site, and a cross-layer transcoder where one may be."""

    @cache
    def built(name: str) -> Built:
        where = tmp_path_factory.mktemp("interventions")
        torch.set_num_threads(1)
        tiny_model(name).save_pretrained(where / "model")
        random = Random(11)
        for set_ in HOOKS:
            wide = HEADS * MODELS[name] if set_ == "z" else D
            for layer in range(LAYERS):
                write_sae(where / set_, layer, random.rows(wide), random.rows(wide))
        sets = [f"{set_}: {{model: m, path: {set_}, reads: {hook}}}" for set_, hook in HOOKS.items()]
        if name in WITH_CROSS_LAYER:
            for layer in range(LAYERS):
                decoders = [random.rows(D) for _ in range(layer, LAYERS)]
                write_cross_layer(where / "clt", layer, random.rows(D), decoders)
            sets.append("c: {model: m, path: clt}")
        text = (
            f"atlas: 1\nmodels: {{m: {{path: model}}}}\ndictionaries: {{{', '.join(sets)}}}\n"
            "edges: [{types: [DIRECT, VIA_HEAD], keep: everything}]\n"
        )
        return build(text, where)

    return built


def edge(
    built: Built, source: tuple[str, int], target: tuple[str, int], head: tuple[int, int] | None
) -> float:
    """The stored weight between the two latents."""
    ends = [built.sets[name].hash_of(layer) for name, layer in (source, target)]
    rows = built.table("DIRECT" if head is None else "VIA_HEAD").to_pylist()
    (found,) = [
        row["weight"]
        for row in rows
        if [row["source_dictionary"], row["target_dictionary"]] == ends
        and (row["source"], row["target"]) == (SOURCE, READER)
        and (head is None or (row["layer"], row["head"]) == head)
    ]
    return found


def written(model: ResidualModel, name: str, layer: int, built: Built, before: int) -> tuple[Write, ...]:
    """What the source latent adds at its places below layer `before`, at one token."""
    dictionary = built.sets[name].load(layer)
    found = []
    for one in dictionary.writes:
        vector = STRENGTH * one.W_dec[SOURCE]
        if one.site == "attn.z":
            vector = torch.einsum("he,hed->d", vector.view(HEADS, -1), model.layers[one.layer].W_O)
        site = {"attn.z": "attn", "resid_post": "mlp"}.get(one.site, one.site)
        vectors = torch.zeros(len(tokens()), D)
        vectors[AT] = vector
        if one.layer < before:
            found.append(Write(site, one.layer, vectors, str(one.at)))
    return tuple(found)


def moved(model: ResidualModel, trace: Trace, writes: tuple[Write, ...], heads=()) -> tuple[Trace, Trace]:
    return model.run_frozen(trace, writes, live_heads=heads), model.run_frozen(trace, live_heads=heads)


def read(built: Built, name: str, layer: int) -> torch.Tensor:
    return built.sets[name].load(layer).encoders[0].W_enc[READER].double()


@pytest.mark.parametrize("target", ["att", "mod", "z"])
@pytest.mark.parametrize(
    ("name", "source"),
    [(name, s) for name in MODELS for s in ("z", "mod", "post", "c") if s != "c" or name in WITH_CROSS_LAYER],
)
def test_through_a_head_to_what_attention_gives(
    name: str, source: str, target: str, building: Callable[[str], Built]
) -> None:
    built = building(name)
    model, head = built.models["m"], (2, 3)
    trace = model.trace(tokens())
    first = 1 if source == "post" else 0  # the residual dictionary just below the head
    after, before = moved(model, trace, written(model, source, first, built, 2), (head,))
    seen = {"att": "attn_out", "mod": "attn_module", "z": "z"}[target]
    change = (getattr(after, seen)[2] - getattr(before, seen)[2])[TO].double().flatten()
    scale = trace.sigma1[2, AT] * (trace.sigma_post1[2, TO] if target == "att" else 1.0)
    if source in ("z", "mod"):
        scale = scale * trace.sigma_post1[0, AT]
    weight = edge(built, (source, first), (target, 2), head)
    want = STRENGTH * float(trace.pattern[2, 3, TO, AT].double() * weight / scale)
    assert abs(want) > 1e-4
    assert float(change @ read(built, target, 2)) == pytest.approx(want, rel=2e-3, abs=2e-5)


@pytest.mark.parametrize("name", WITH_CROSS_LAYER)
def test_a_cross_layer_latent_moves_a_reader_by_all_its_decoders_below_it(
    name: str, building: Callable[[str], Built]
) -> None:
    built = building(name)
    model = built.models["m"]
    trace = model.trace(tokens())
    reader = read(built, "c", 2)
    after, before = moved(model, trace, written(model, "c", 0, built, 2))
    change = (after.mlp_in[2] - before.mlp_in[2])[AT].double()
    want = STRENGTH * edge(built, ("c", 0), ("c", 2), None) / float(trace.sigma2[2, AT])
    assert abs(want) > 1e-3
    assert float(change @ reader) == pytest.approx(want, rel=2e-3, abs=2e-5)


@pytest.mark.parametrize("name", MODELS)
def test_a_residual_dictionary_moves_the_next_one(name: str, building: Callable[[str], Built]) -> None:
    """From one residual dictionary to that of the next layer, directly and through a head between them."""
    built = building(name)
    model = built.models["m"]
    trace = model.trace(tokens())
    writes, reader = written(model, "post", 0, built, 1), read(built, "post", 1)
    after, before = moved(model, trace, writes)
    change = (after.resid_pre[2] - before.resid_pre[2]).double() @ reader
    want = STRENGTH * edge(built, ("post", 0), ("post", 1), None)
    assert float(change[AT]) == pytest.approx(want, rel=2e-3, abs=2e-5)
    assert float(change[TO]) == pytest.approx(0, abs=2e-5)
    after, before = moved(model, trace, writes, ((1, 0),))
    change = (after.resid_pre[2] - before.resid_pre[2]).double() @ reader
    scale = trace.sigma1[1, AT] * trace.sigma_post1[1, TO]
    weight = edge(built, ("post", 0), ("post", 1), (1, 0))
    want = STRENGTH * float(trace.pattern[1, 0, TO, AT].double() * weight / scale)
    assert float(change[TO]) == pytest.approx(want, rel=2e-3, abs=2e-5)
