"""The demo: starts a core and a gateway with the demo model, asks one question, prints the answer as it streams."""

import sys

from local_pair import PairError, running_pair

from headrace.client import Client, chat_prompt
from headrace.common.demo_model import fetch_demo_model
from headrace.common.errors import RequestError, StartupError
from headrace.common.v1 import params_pb2
from headrace.gateway_api.v1 import generation_pb2 as pb

QUESTION = "What is the capital of France?"
TIMEOUT_S = 120.0


def ask(server: str, question: str) -> str:
    """Prints the answer piece by piece; returns why it ended. RequestError if the gateway refuses or fails."""
    request = pb.GenerateRequest(
        prompt=chat_prompt([("user", question)]),
        sampling=params_pb2.SamplingParams(temperature=0, max_tokens=64),
        output_kind=pb.OUTPUT_KIND_DELTA,
    )
    reason = params_pb2.FINISH_REASON_UNSPECIFIED
    with Client(server) as client:
        for message in client.generate(request, deadline_s=TIMEOUT_S):
            for output in message.outputs:
                print(output.text, end="", flush=True)
                reason = output.finish_reason or reason
    print()
    return params_pb2.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()


def main() -> int:
    """Runs the demo; returns the exit code."""
    try:
        fetch_demo_model()
        print("Starting a core and a gateway ...", flush=True)
        with running_pair("--model", "demo", "--log-level", "error") as server:
            print(f"Serving at {server}.\n\n> {QUESTION}", flush=True)
            reason = ask(server, QUESTION)
        print(f"\nThe answer ended by {reason}; both services have stopped.")
    except (PairError, RequestError, StartupError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
