"""What the content of a KV block depends on besides its tokens and what comes before it."""

from dataclasses import dataclass

# Typed, so that a salt never equals an adapter of the same name.
ExtraKey = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class BlockKeys:
    """The extra keys of one request's blocks. Those of the first block isolate all that follow it."""

    first: ExtraKey = ()

    def of_block(self, position: int) -> ExtraKey:
        """The extra key of the block at `position` in the request."""
        return self.first if position == 0 else ()
