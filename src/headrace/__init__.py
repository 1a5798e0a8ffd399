"""headrace: LLM serving as a gateway (text) and an engine core (token ids) with a typed gRPC contract between them."""

__version__ = "0.1.0"
