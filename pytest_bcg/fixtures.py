"""Fixtures for tests of captured graphs. Torch and ``bcg_core`` are imported as they are used."""

from __future__ import annotations

import pytest


@pytest.fixture
def bcg_backend(): ...
@pytest.fixture
def bcg_capture(): ...
@pytest.fixture
def bcg_device(): ...
@pytest.fixture
def assert_replay_equals_eager(): ...
@pytest.fixture
def tiny_pipeline(): ...
