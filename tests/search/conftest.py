"""Plans that tests of the search make are kept in a cache of their own, shared by one run of the tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True, scope="session")
def plan_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """$RAYDP_CACHE for this process and the processes that it starts."""
    directory = tmp_path_factory.mktemp("plans")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAYDP_CACHE", str(directory))
        yield directory
