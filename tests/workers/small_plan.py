"""A small plan as a program of its own: `python small_plan.py FOLDER [SECONDS]`, for tests that kill it.

Four steps write several files each (Parquet among them), one expands, one merges; SECONDS (default 0) is how
long each file takes beside its writing.
"""

import hashlib
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from workers.artifacts import Artifacts, sole_builder
from workers.local import LocalExecutor
from workers.plan import Done, Expand, PlanInterrupted, Step, run_plan

PAUSE = float(sys.argv[2]) if len(sys.argv) > 2 else 0.0


def numbers(step, inputs, out, context):
    """Writes four tables that its seed decides, and a folder with a file."""
    for part in range(4):
        context.progress(part, 4, "tables")
        text = hashlib.sha256(f"{step.params['seed']} {part}".encode()).hexdigest()
        pq.write_table(pa.table({"text": [text] * 2000, "row": range(2000)}), out / f"part-{part}.parquet")
        time.sleep(PAUSE)
    (out / "more").mkdir()
    (out / "more" / "bytes.bin").write_bytes(text.encode() * 3000)
    return Done({"seed": step.params["seed"]})


def spread(step, inputs, out, context):
    """Answers with a step for each table of its input."""
    names = sorted(path.name for path in inputs["numbers"].glob("*.parquet"))
    (out / "listed.txt").write_text("\n".join(names))
    seeds = [10 * step.params["seed"] + part for part in range(2)]
    return Expand(tuple(Step("numbers", 1, {"seed": seed}, {"spread": step.name}) for seed in seeds))


def merge(step, inputs, out, context):
    """One table of all."""
    folders = [folder for role in sorted(inputs) for folder in Artifacts.expanded(inputs[role])]
    tables = [pq.read_table(path) for folder in folders for path in sorted(folder.glob("*.parquet"))]
    pq.write_table(pa.concat_tables(tables), out / "merged.parquet")
    return Done({"rows": sum(table.num_rows for table in tables)})


REGISTRY = {"numbers": (1, numbers), "spread": (1, spread), "merge": (1, merge)}


def plan() -> list[Step]:
    """The steps."""
    first = [Step("numbers", 1, {"seed": seed}) for seed in (1, 2)]
    wide = Step("spread", 1, {"seed": 3}, {"numbers": first[0].name})
    last = Step("merge", 1, {}, {"a": first[1].name, "b": wide.name})
    return [*first, wide, last]


def main() -> int:
    """Builds into the folder; 130 after Ctrl-C."""
    folder = Path(sys.argv[1])
    artifacts = Artifacts(folder / "artifacts")
    executor = LocalExecutor(REGISTRY, artifacts, workers=2)
    with sole_builder(folder):
        try:
            report = run_plan(plan(), executor, artifacts, display=lambda now: print(now, flush=True))
        except PlanInterrupted as interrupted:
            print(interrupted, flush=True)
            return 130
    print(f"{len(report.ran)} ran, {len(report.reused)} reused", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
