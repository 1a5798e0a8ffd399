"""Numbers on the command line."""

import argparse


def positive(text: str) -> int:
    """A whole number from 1. Raises argparse.ArgumentTypeError."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; got {text}")
    return number
