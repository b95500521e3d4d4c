"""Runs a spec's plan in this process and reads the tables it leaves."""

from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from ingest.dictionaries import DictionarySet, open_set
from ingest.models import ResidualModel, open_model
from ingest.spec import parse_spec
from workers.artifacts import Artifacts
from workers.build import REGISTRY, plan
from workers.local import LocalExecutor
from workers.plan import run_plan


@dataclass(frozen=True, eq=False)
class Built:
    """What a build works on and what came of it."""

    models: dict[str, ResidualModel]
    sets: dict[str, DictionarySet]
    artifacts: Artifacts

    def table(self, name: str) -> pa.Table:
        """All rows of a table of the schema, dictionary columns as strings."""
        parts = [pq.read_table(path) for path in sorted(self.artifacts.root.rglob(f"{name}.parquet"))]
        table = pa.concat_tables(parts)
        return table.cast(
            pa.schema(
                (f.name, f.type.value_type if pa.types.is_dictionary(f.type) else f.type)
                for f in table.schema
            )
        )


def build(text: str, folder: Path, artifacts_in: Path | None = None) -> Built:
    """Builds the artifacts of a spec whose paths are seen from `folder`, under `artifacts_in` or there."""
    torch.set_num_threads(1)
    spec = parse_spec(text, base=folder)
    models = {name: open_model(entry.where, name=name) for name, entry in spec.models.items()}
    sets = {
        name: open_set(
            entry.where,
            name=name,
            model=models[entry.model],
            format=entry.format,
            layers=entry.layers,
            declared=entry.declared,
        )
        for name, entry in spec.dictionaries.items()
    }
    made = plan(spec, models, sets)
    artifacts = Artifacts((artifacts_in or folder) / "artifacts")
    executor = LocalExecutor(REGISTRY, artifacts, 2)
    made.share(executor.shared)
    run_plan(made.steps, executor, artifacts, made.sources)
    return Built(models, sets, artifacts)
