"""Where sets are found: paths, the hub and folders of it; and what the user says that files do not."""

from types import SimpleNamespace

import pytest

from ingest.dictionaries import Declared, describe_set, formats
from ingest.errors import InputError
from ingest.places import hub_place, resolve_place
from tests.ingest.small_dictionaries import Facts, opened, tensors, write_set


def refused(where, **options):
    with pytest.raises(InputError) as caught:
        describe_set(where, Facts(), **options)
    line = str(caught.value)
    assert "\n" not in line
    return line


# --- names of places ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("owner/name", ("owner/name", "")),
        ("owner/name/layer_5/width_16k/average_l0_58", ("owner/name", "layer_5/width_16k/average_l0_58")),
        ("owner/name/v5_32k_layer_8.mlp/", ("owner/name", "v5_32k_layer_8.mlp")),
        ("owner", None),
        ("owner/name/../secret", None),
        ("/owner/name/folder", None),
        ("owner/name//folder", None),
        ("owner/name/fold*er", None),
    ],
)
def test_folders_of_hub_names(text, place):
    assert hub_place(text) == place


def test_a_folder_of_a_hub_name_is_a_place_for_dictionaries_alone(tmp_path):
    assert resolve_place("owner/name/layer_5", tmp_path, folders=True) == "owner/name/layer_5"
    with pytest.raises(InputError, match="no such file or directory"):
        resolve_place("owner/name/layer_5", tmp_path)


def test_a_mistyped_path_is_not_taken_for_a_hub_name(tmp_path):
    """Its first folder is here, so it was meant to be here."""
    (tmp_path / "sets").mkdir()
    with pytest.raises(InputError, match="no such file or directory"):
        resolve_place("sets/tc/layer_5", tmp_path, folders=True)


def test_a_path_that_exists_wins(tmp_path):
    (tmp_path / "owner" / "name" / "layer_5").mkdir(parents=True)
    assert resolve_place("owner/name/layer_5", tmp_path, folders=True).startswith(str(tmp_path))


# --- the hub ------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch):
    """A hub that lists `files` (name, bytes) and gives `folder`; what it was asked for is kept in `asked`."""
    served = SimpleNamespace(files=[("config.yaml", 10)], folder=None, asked=[])

    def snapshot(name, *, allow_patterns, dry_run=False):
        served.asked.append((name, tuple(allow_patterns), dry_run))
        if dry_run:
            return [SimpleNamespace(filename=file, file_size=size) for file, size in served.files]
        return str(served.folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    return served


def test_a_hub_name_is_fetched_by_the_formats_files_alone(tmp_path, hub):
    hub.folder = write_set(tmp_path / "set", {0: tensors()})
    assert opened("owner/set", format="circuit-tracer").layers == (0,)
    patterns = ("config.yaml", "*/config.yaml", "layer_*.safetensors", "*/layer_*.safetensors")
    assert hub.asked == [("owner/set", patterns, True), ("owner/set", patterns, False)]


def test_without_a_format_every_formats_files_are_fetched(tmp_path, hub):
    hub.folder = write_set(tmp_path / "set", {0: tensors()})
    assert opened("owner/set").layers == (0,)
    assert {file for reader in formats().values() for file in reader.hub_files} <= set(hub.asked[0][1])


def test_a_folder_of_a_hub_name_is_fetched_alone(tmp_path, hub):
    hub.folder = tmp_path / "snapshot"
    write_set(hub.folder / "sub" / "tc", {2: tensors()})
    assert opened("owner/set/sub/tc", format="circuit-tracer").layers == (2,)
    assert all(pattern.startswith("sub/tc/") for _, patterns, _ in hub.asked for pattern in patterns)
    hub.folder = tmp_path / "empty"
    assert "owner/set on the hub has no folder sub/tc" in refused("owner/set/sub/tc", format="circuit-tracer")


def test_a_hub_repository_of_every_dictionary_is_not_fetched_whole(hub):
    hub.files = [(f"layer_{layer}/width_1m/params.npz", 9 << 30) for layer in range(26)]
    line = refused("owner/scope")
    assert "its dictionaries are 251 GB in 26 folders" in line
    assert "such as owner/scope/layer_9/width_1m" in line
    assert not any(dry_run is False for _, _, dry_run in hub.asked)


def test_a_hub_repository_without_dictionaries(hub):
    hub.files = []
    assert "owner/model: has no files of a known dictionary format on the hub" in refused("owner/model")


def test_a_hub_that_cannot_list_may_still_have_it_in_the_cache(tmp_path, monkeypatch):
    from huggingface_hub.errors import DryRunError

    folder = write_set(tmp_path / "set", {0: tensors()})

    def cached(name, *, allow_patterns, dry_run=False):
        if dry_run:
            raise DryRunError("offline")
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", cached)
    assert opened("owner/set").layers == (0,)


def test_a_hub_that_does_not_answer(monkeypatch):
    def unreachable(name, **options):
        raise OSError("no route\nto host")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    line = refused("owner/set")
    assert line == "owner/set: no such directory, and not to be had from the hub (no route to host)"


# --- what is declared ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "declared",
    [
        Declared(layer=1),
        Declared(reads="mlp.in"),
        Declared(reads="blocks.1.mlp.hook_in", writes="mlp.hook_out", layer=1),
    ],
)
def test_what_is_declared_and_so_may_stand(tmp_path, declared):
    assert opened(write_set(tmp_path / "set", {1: tensors()}), declared=declared).layers == (1,)


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        (Declared(layer=2), "layer 2 was declared, the files are of layer 1"),
        (Declared(reads="resid_post"), "reads: resid_post was declared, the files say mlp.in"),
        (Declared(reads="hook_mlp_in"), "reads: hook_mlp_in was declared, the files say mlp.in (normalised"),
        (Declared(writes="hook_resid_post"), "writes: hook_resid_post was declared, the files say mlp"),
        (Declared(reads="hook_resid"), "reads: unknown hook 'hook_resid'"),
    ],
)
def test_what_is_declared_and_not_so(tmp_path, declared, said):
    assert said in refused(write_set(tmp_path / "set", {1: tensors()}), declared=declared)
