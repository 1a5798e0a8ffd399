"""The core's own version: its image tag and its section of CHANGELOG.md carry the same."""

CORE_VERSION = "0.1.0"
