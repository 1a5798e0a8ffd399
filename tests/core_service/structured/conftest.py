import pytest
from grammar_walks import build_backend


@pytest.fixture(scope="session")
def backend():
    """llguidance over the small vocabulary of `grammar_walks`."""
    backend = build_backend()
    yield backend
    backend.close()
