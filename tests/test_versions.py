"""Each side's version and the contract's are the same wherever they are written down."""

import re
from pathlib import Path

import pytest

import headrace
from headrace.common.contract_version import CONTRACT_VERSION
from headrace.core_service.version import CORE_VERSION
from headrace.gateway.version import GATEWAY_VERSION

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = {"Contract": CONTRACT_VERSION, "Gateway": GATEWAY_VERSION, "Core": CORE_VERSION}
IMAGES = {"gateway": GATEWAY_VERSION, "core": CORE_VERSION}
TAG = re.compile(r"headrace-(gateway|core):(\d+(?:\.\d+)*)")


def newest_entries() -> dict[str, str]:
    """The first version below each section's heading in CHANGELOG.md."""
    text = (ROOT / "CHANGELOG.md").read_text()
    return dict(re.findall(r"^## (\w+)\n.*?^### (\S+)", text, flags=re.MULTILINE | re.DOTALL))


def test_changelog_sections_start_with_the_current_versions() -> None:
    assert newest_entries() == VERSIONS


@pytest.mark.parametrize(
    "file",
    ["docker-compose.yml", ".env.example", *(f"deploy/{side}.Dockerfile" for side in IMAGES)],
)
def test_image_tags_are_the_versions_of_the_sides(file: str) -> None:
    tags = TAG.findall((ROOT / file).read_text())
    assert tags
    assert [(side, tag) for side, tag in tags if IMAGES[side] != tag] == []


@pytest.mark.parametrize("side", IMAGES)
def test_image_labels_are_the_versions_of_the_sides(side: str) -> None:
    text = (ROOT / "deploy" / f"{side}.Dockerfile").read_text()
    assert re.findall(r'image\.version="([^"]+)"', text) == [IMAGES[side]]


def test_a_contract_image_of_the_current_version_is_released() -> None:
    released = {path.stem for path in (ROOT / "protos" / "released").glob("*.binpb")}
    assert CONTRACT_VERSION in released


def test_the_distribution_is_as_new_as_its_sides() -> None:
    """One distribution carries both sides, so its version is at least the newer of theirs."""

    def numbers(version: str) -> tuple[int, ...]:
        return tuple(map(int, version.split(".")))

    assert numbers(headrace.__version__) >= max(numbers(GATEWAY_VERSION), numbers(CORE_VERSION))
