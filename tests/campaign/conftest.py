"""Long and short forms: `CAMPAIGN=long` runs the former, anything else the latter."""

import os

import pytest


@pytest.fixture(scope="session")
def scale():
    """How much longer this run is than the short form."""
    return 20 if os.environ.get("CAMPAIGN") == "long" else 1
