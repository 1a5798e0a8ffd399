"""Streams an answer from a running gateway (start one with `make up`).

usage: .venv/bin/python examples/generate.py ["a question"] [HOST:PORT]
"""

import sys

from headrace.client import Client, chat_prompt
from headrace.common.errors import RequestError
from headrace.common.v1.params_pb2 import SamplingParams
from headrace.gateway_api.v1.generation_pb2 import GenerateRequest


def main(question: str = "What is the capital of France?", server: str = "127.0.0.1:50051") -> None:
    """Prints the text as it arrives, then the token counts."""
    request = GenerateRequest(
        prompt=chat_prompt([("user", question)]),
        sampling=SamplingParams(temperature=0, max_tokens=100),
    )
    with Client(server) as client:
        for message in client.generate(request):
            for output in message.outputs:
                print(output.text, end="", flush=True)
    print(f"\n{message.usage.prompt_tokens} prompt tokens, {message.usage.output_tokens} output tokens")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except RequestError as error:
        sys.exit(f"generate.py: {error.message}")
