"""The stores under test. What holds for one holds for all: a suite asks for `toy` and gets every store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from atlas.load import load_run
from atlas.store import Store, open_store
from tests.atlas.synthetic import Synthetic


def embedded_store(model: Synthetic, path: Path) -> Store:
    """The model's artifacts loaded into an atlas's folder, opened."""
    model.write(path)
    load_run(path, model.manifest())
    return open_store(path)


STORES: dict[str, Callable[[Synthetic, Path], Store]] = {"embedded": embedded_store}
"""How each store is filled with a model and opened."""


@dataclass
class Toy:
    """A small model loaded into a store."""

    model: Synthetic
    store: Store


@pytest.fixture(scope="session", params=sorted(STORES))
def toy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Toy]:
    model = Synthetic()
    with STORES[request.param](model, tmp_path_factory.mktemp("toy") / "toy.atlas") as store:
        yield Toy(model, store)
