"""The integration tests' small pools serve here, too; and one set of certificates for all tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "integration"))
sys.path.insert(0, str(Path(__file__).parent))

from security_harness import Certificates


@pytest.fixture(scope="session")
def shared_certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Certificates that no test changes."""
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    """Certificates of this test's own."""
    return Certificates(tmp_path / "certificates")
