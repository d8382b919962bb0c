"""The security tests' certificates as fixtures: a plugin of the test modules that name it."""

from __future__ import annotations

from pathlib import Path

import pytest
from security_harness import Certificates


@pytest.fixture(scope="session")
def shared_certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Certificates that no test changes."""
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    """Certificates of this test's own."""
    return Certificates(tmp_path / "certificates")
