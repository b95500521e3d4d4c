"""The checksum of a store's content: blind to order, ids and times, and to nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from atlas.load import load_run
from atlas.store import open_store
from atlas.store.checksum import content_checksum
from tests.atlas.synthetic import Synthetic


def checksum(path: Path) -> str:
    with open_store(path) as store:
        return content_checksum(store)


def load(path: Path, *models: Synthetic, **changes: str) -> Path:
    for model in models:
        model.write(path)
        load_run(path, model.manifest(**changes))
    return path


def test_order_ids_and_times_do_not_matter(tmp_path: Path) -> None:
    one, two = Synthetic("one", n_edges=80), Synthetic("two", n_edges=80)
    straight = load(tmp_path / "straight.atlas", one, two)
    turned = load(tmp_path / "turned.atlas", two, one, ended="2027-01-01T00:00:00Z")
    assert checksum(straight) == checksum(turned)


def test_the_last_bit_of_one_weight_matters(tmp_path: Path) -> None:
    model = Synthetic(n_edges=80)
    right = checksum(load(tmp_path / "right.atlas", model))
    folder = Synthetic(n_edges=80).write(tmp_path / "changed.atlas")
    file = folder.artifact(model.step("edges2")) / "DIRECT.parquet"
    rows = pq.read_table(file)
    weight = rows["weight"].to_numpy().copy()
    weight[3] = np.nextafter(weight[3], np.float32(9))
    pq.write_table(rows.set_column(rows.column_names.index("weight"), "weight", pa.array(weight)), file)
    load_run(folder.path, model.manifest())
    assert checksum(folder.path) != right


def test_the_step_that_made_a_row_matters(tmp_path: Path) -> None:
    model = Synthetic(n_edges=80)
    other = Synthetic(n_edges=80)
    other.step = lambda kind: f"other-{Synthetic.step(model, kind)}"  # type: ignore[method-assign]
    assert checksum(load(tmp_path / "a.atlas", model)) != checksum(load(tmp_path / "b.atlas", other))
