"""What all tests share: one thread each, no network, and no silent skips in CI."""

import os

import pytest

# Before torch, numba and transformers are imported: tests run beside each other, and must not ask a hub.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

IN_CI = os.environ.get("CI", "").lower() not in ("", "0", "false", "no")


def _fail_if_skipped(report: pytest.TestReport | pytest.CollectReport, where: str) -> None:
    """Turns a skip into a failure that gives the skip's reason."""
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{where}: skipped, and in CI nothing may be: {reason}"


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """In CI a skipped test has failed, unless it is marked `hardware`."""
    outcome = yield
    if IN_CI and item.get_closest_marker("hardware") is None:
        _fail_if_skipped(outcome.get_result(), item.nodeid)


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report(collector):
    """In CI a module that skips itself whole has failed."""
    outcome = yield
    if IN_CI:
        _fail_if_skipped(outcome.get_result(), collector.nodeid)
