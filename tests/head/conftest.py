"""What the tests of the linear layer share as a fixture."""

import pytest
from common import forget_heads


@pytest.fixture
def patched(monkeypatch):
    """Patches what code for one device is made from."""
    forget_heads()
    yield monkeypatch
    forget_heads()
