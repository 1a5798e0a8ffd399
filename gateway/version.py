"""The gateway's own version: its image tag and its section of CHANGELOG.md carry the same."""

GATEWAY_VERSION = "0.1.0"
