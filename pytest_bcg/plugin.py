"""The plugin's hooks; each calls the file that knows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pytest_bcg import gpus, markers, options, selection
from pytest_bcg.fixtures import (
    assert_replay_equals_eager,
    bcg_backend,
    bcg_capture,
    bcg_device,
    tiny_pipeline,
)
from pytest_bcg.isolation import scheduling
from pytest_bcg.isolation import session as isolation

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "assert_replay_equals_eager",
    "bcg_backend",
    "bcg_capture",
    "bcg_device",
    "tiny_pipeline",
]


def pytest_addoption(parser: pytest.Parser) -> None:
    options.add(parser)


def pytest_configure(config: pytest.Config) -> None:
    markers.register(config)
    options.check(config)
    selection.configure(config)
    isolation.configure(config)


@pytest.hookimpl(tryfirst=True)
def pytest_make_collect_report(collector: pytest.Collector) -> pytest.CollectReport | None:
    return isolation.of(collector.config).collect(collector)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Any:
    markers.check(config, items)
    selection.apply(config, items)
    markers.deselect_nightly(config, items)
    result = yield
    # Only tests that -m, -k and the like have left may cost the import of torch.
    gpus.skip_without_devices(items)
    return result


def pytest_report_collectionfinish(
    config: pytest.Config, items: Sequence[pytest.Item]
) -> str | None:
    return isolation.of(config).describe(items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    return isolation.of(item.config).run(item, nextitem) or None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    gpus.skip_without_memory(item)


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item) -> bool | None:
    # The timer runs in the test's own process; here it would interrupt the wait for it.
    return isolation.of(item.config).takes(item) or None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return scheduling.scheduler(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    isolation.of(session.config).close()


def pytest_unconfigure(config: pytest.Config) -> None:
    isolation.unconfigure(config)
