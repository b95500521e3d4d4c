"""The plan on steps small enough to follow by hand, run by the local executor."""

import json
import threading
import time

import pytest

from ingest.errors import InputError
from workers.artifacts import Artifacts
from workers.local import LocalExecutor
from workers.plan import Cancelled, Done, Expand, Needs, Step, StepFailed, perform, run_plan


def number(step, inputs, out, context):
    """Writes its parameter."""
    (out / "value.txt").write_text(str(step.params["value"]))
    return Done({"value": step.params["value"]})


def total(step, inputs, out, context):
    """Adds up the values of its inputs, each of which may have expanded."""
    folders = [folder for role in sorted(inputs) for folder in Artifacts.expanded(inputs[role])]
    values = [int((folder / "value.txt").read_text()) for folder in folders]
    (out / "value.txt").write_text(str(sum(values)))
    return Done({"terms": values})


def split(step, inputs, out, context):
    """Answers with one step for each value; those read a file of this step's own."""
    (out / "offset.txt").write_text("100")
    children = [
        Step("shifted", 1, {"value": value}, {"offset": step.name}, title=f"shift {value}")
        for value in step.params["values"]
    ]
    return Expand(tuple(children))


def shifted(step, inputs, out, context):
    """Adds its value to the offset that the splitting step wrote."""
    value = step.params["value"] + int((inputs["offset"] / "offset.txt").read_text())
    (out / "value.txt").write_text(str(value))
    return Done()


STEPS = {"number": (1, number), "total": (1, total), "split": (1, split), "shifted": (1, shifted)}


def run(tmp_path, steps, registry=STEPS, **options):
    artifacts = Artifacts(tmp_path / "artifacts")
    return run_plan(steps, LocalExecutor(registry, artifacts, workers=3, **options), artifacts), artifacts


def test_a_name_is_what_decides_the_result_and_nothing_else():
    step = Step("number", 1, {"b": 1, "a": [1.5, "é"]}, {"x": "sha256:00"}, Needs(memory=7), "title")
    same = Step("number", 1, {"a": (1.5, "é"), "b": 1}, {"x": "sha256:00"})
    assert step == same and step.name == same.name and len(step.name) == 64
    others = [
        Step("numbers", 1, step.params, step.inputs),
        Step("number", 2, step.params, step.inputs),
        Step("number", 1, {**step.params, "b": 2}, step.inputs),
        Step("number", 1, step.params, {"x": "sha256:01"}),
        Step("number", 1, step.params, {"y": "sha256:00"}),
    ]
    assert len({other.name for other in [step, *others]}) == 6
    assert Step.from_json(json.loads(json.dumps(step.as_json()))).name == step.name


def test_a_step_keeps_its_own_copy_of_the_parameters():
    params = {"value": [1]}
    step = Step("number", 1, params)
    params["value"].append(2)
    assert step.params == {"value": [1]}


def test_parameters_that_json_cannot_hold_are_refused():
    with pytest.raises(ValueError):
        Step("number", 1, {"value": float("nan")})
    with pytest.raises(TypeError):
        Step("number", 1, {"value": {1, 2}})


def test_a_merge_finds_its_inputs_and_a_second_run_computes_nothing(tmp_path):
    numbers = [Step("number", 1, {"value": value}) for value in (1, 2, 3)]
    merge = Step("total", 1, {}, {f"n{i}": step.name for i, step in enumerate(numbers)})
    report, artifacts = run(tmp_path, [merge, *numbers])  # any order
    assert artifacts.figures(merge.name) == {"terms": [1, 2, 3]}
    assert set(report.ran) == {step.name for step in [merge, *numbers]} and not report.reused

    again, _ = run(tmp_path, [merge, *numbers])
    assert not again.ran and len(again.reused) == 4 and again.finished == 4


def test_a_merge_waits_for_what_its_input_expanded_into(tmp_path):
    source = Step("split", 1, {"values": [1, 2, 3]})
    merge = Step("total", 1, {}, {"parts": source.name})
    report, artifacts = run(tmp_path, [source, merge])
    assert artifacts.figures(merge.name) == {"terms": [101, 102, 103]}
    assert [str(step) for step in report.steps][1:4] == ["shift 1", "shift 2", "shift 3"]

    again, _ = run(tmp_path, [source, merge])
    assert not again.ran and [step.name for step in again.steps] == [step.name for step in report.steps]


def test_expansions_of_expansions_are_merged_in_their_order(tmp_path):
    def nest(step, inputs, out, context):
        return Expand(tuple(Step("split", 1, {"values": values}) for values in step.params["groups"]))

    outer = Step("nest", 1, {"groups": [[5, 4], [], [3]]})
    merge = Step("total", 1, {}, {"all": outer.name})
    report, artifacts = run(tmp_path, [outer, merge], {**STEPS, "nest": (1, nest)})
    assert artifacts.figures(merge.name) == {"terms": [105, 104, 103]}
    assert len(report.steps) == 2 + 3 + 3


def test_a_step_already_in_the_plan_may_be_part_of_an_expansion(tmp_path):
    source = Step("split", 1, {"values": [7]})
    planned = Step("shifted", 1, {"value": 7}, {"offset": source.name})
    merge = Step("total", 1, {}, {"parts": source.name})
    report, artifacts = run(tmp_path, [merge, planned, source])
    assert artifacts.figures(merge.name) == {"terms": [107]} and len(report.ran) == 3


def test_only_what_is_missing_or_damaged_runs_again(tmp_path):
    numbers = [Step("number", 1, {"value": value}) for value in (1, 22)]
    merge = Step("total", 1, {}, {"a": numbers[0].name, "b": numbers[1].name})
    _, artifacts = run(tmp_path, [*numbers, merge])
    (artifacts.path(numbers[1].name) / "value.txt").write_text("2")  # as a crash of the machine may leave it
    report, _ = run(tmp_path, [*numbers, merge])
    assert set(report.ran) == {numbers[1].name}
    assert (artifacts.path(numbers[1].name) / "value.txt").read_text() == "22"


def test_bad_input_in_a_step_is_raised_as_itself_and_others_stay_finished(tmp_path):
    def refuse(step, inputs, out, context):
        (out / "half.txt").write_text("half")
        raise InputError("model.gguf: truncated")

    good = Step("number", 1, {"value": 1})
    bad = Step("refuse", 1, {}, {"after": good.name})
    with pytest.raises(InputError, match=r"^model\.gguf: truncated$"):
        run(tmp_path, [good, bad], {**STEPS, "refuse": (1, refuse)})
    artifacts = Artifacts(tmp_path / "artifacts")
    assert artifacts.has(good.name) and not artifacts.path(bad.name).exists()
    assert not list((tmp_path / "artifacts" / "tmp").iterdir())


@pytest.mark.parametrize("error", [MemoryError("no room"), ZeroDivisionError("why"), SystemExit(3)])
def test_any_other_error_carries_the_step_and_its_cause(tmp_path, error):
    def fail(step, inputs, out, context):
        raise error

    with pytest.raises(StepFailed, match=rf"'heads of layer 3'.*{type(error).__name__}") as caught:
        run(tmp_path, [Step("fail", 1, title="heads of layer 3")], {"fail": (1, fail)})
    assert caught.value.__cause__ is error


def test_a_failure_asks_running_steps_to_stop_and_drops_queued_ones(tmp_path):
    began, stopped = threading.Event(), []

    def fail(step, inputs, out, context):
        assert began.wait(10)
        raise ValueError("first")

    def patient(step, inputs, out, context):
        began.set()
        try:
            while True:
                context.progress(0, 1)
                time.sleep(0.005)
        except Cancelled:
            stopped.append(step.name)
            raise

    steps = [Step("fail", 1), Step("patient", 1), *(Step("number", 1, {"value": i}) for i in range(3))]
    artifacts = Artifacts(tmp_path)
    executor = LocalExecutor({**STEPS, "fail": (1, fail), "patient": (1, patient)}, artifacts, workers=2)
    with pytest.raises(StepFailed, match="first"):
        run_plan(steps, executor, artifacts)
    assert stopped == [steps[1].name]
    assert not artifacts.has(steps[4].name)  # was queued behind two steps that did not end by themselves


def test_an_executor_takes_another_plan_after_a_failed_one(tmp_path):
    def fail(step, inputs, out, context):
        raise ValueError

    artifacts = Artifacts(tmp_path)
    executor = LocalExecutor({**STEPS, "fail": (1, fail)}, artifacts, workers=2)
    with pytest.raises(StepFailed):
        run_plan([Step("fail", 1)], executor, artifacts)
    assert len(run_plan([Step("number", 1, {"value": 1})], executor, artifacts).ran) == 1


def test_an_input_that_nothing_supplies_is_named(tmp_path):
    step = Step("total", 1, {}, {"a": "sha256:12"}, title="sum")
    with pytest.raises(ValueError, match="'sum', input a = sha256:12"):
        run(tmp_path, [step])


def test_steps_that_wait_for_each_other_are_an_error_not_a_hang(tmp_path):
    merge_of = {}

    def knot(step, inputs, out, context):
        # Its child waits for the merge, and the merge for all of its expansion.
        return Expand((Step("total", 1, {"child": 1}, {"a": merge_of["name"]}),))

    source = Step("knot", 1)
    merge = Step("total", 1, {}, {"parts": source.name})
    merge_of["name"] = merge.name
    with pytest.raises(ValueError, match="wait for each other"):
        run(tmp_path, [source, merge], {**STEPS, "knot": (1, knot)})


def test_a_version_that_the_worker_lacks_is_refused(tmp_path):
    with pytest.raises(StepFailed, match="wants number version 2, this worker has version 1"):
        run(tmp_path, [Step("number", 2, {"value": 1})])


def test_sources_reach_the_step_by_their_content_hash(tmp_path):
    def read(step, inputs, out, context):
        return Done({"text": inputs["file"].read_text()})

    source = tmp_path / "in.txt"
    source.write_text("words")
    step = Step("read", 1, {}, {"file": "sha256:ab"})
    artifacts = Artifacts(tmp_path / "artifacts")
    run_plan([step], LocalExecutor({"read": (1, read)}, artifacts), artifacts, {"sha256:ab": source})
    assert artifacts.figures(step.name) == {"text": "words"}


def test_a_long_chain_keeps_its_order_of_dependence(tmp_path):
    order = []

    def link(step, inputs, out, context):
        order.append(step.params["i"])
        return Done()

    chain = [Step("link", 1, {"i": 0})]
    for i in range(1, 300):
        chain.append(Step("link", 1, {"i": i}, {"before": chain[-1].name}))
    run(tmp_path, chain[::-1], {"link": (1, link)})
    assert order == list(range(300))


def test_a_step_whose_artifact_came_meanwhile_is_not_run(tmp_path):
    artifacts = Artifacts(tmp_path)
    step = Step("number", 1, {"value": 5})
    run_plan([step], LocalExecutor(STEPS, artifacts), artifacts)
    perform(step, {}, artifacts, {}, None)  # a message delivered twice: neither registry nor context is asked
    assert artifacts.figures(step.name) == {"value": 5}
