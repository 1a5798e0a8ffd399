"""What the gateway does with a token: from a core's decoded step to the text that waits for its stream, and on from
there to the client's message. Nothing is sent.
"""

import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.common.params import ModelLimits, SamplingParams
from headrace.common.tokenizer_files import TokenizerFiles
from headrace.core_api.v1 import engine_core_pb2 as core_pb
from headrace.gateway.input_processor import Arrival, PreparedRequest
from headrace.gateway.request_stream import RequestStream
from headrace.gateway.served_model import ServedModel
from headrace.gateway.slots import SlotTable
from headrace.gateway.step_demux import deliver_step
from headrace.gateway.text_tools import TextTools
from headrace.gateway_api.v1 import generation_pb2 as pb

STEPS = 200  # a round
NEVER_THERE = "\n\nNobody writes this:"  # a stop string of usual length, which is looked for in vain


@dataclass(frozen=True, slots=True)
class TokenCost:
    """Microseconds a token, the mean of a round."""

    to_text: float
    to_message: float  # serialized; where every step's tokens are sent at once


class OutputBenchmark:
    """The output side for one tokenizer, over random tokens of its vocabulary: harder to cache than any text, and some
    end inside characters.
    """

    def __init__(self, files: TokenizerFiles) -> None:
        """Takes some tenths of a second. Raises StartupError if the files do not make a tokenizer."""
        self._tools = TextTools.from_files(files)
        info = core_pb.CoreInfo(model="bench", eos_token_ids=files.eos_token_ids)
        vocab_size = self._tools.tokenizer.vocab_size
        limits = ModelLimits(vocab_size, max_model_len=8192, max_logprobs=20)
        self._model = ServedModel("bench", info, limits, SamplingParams(), self._tools, max_text_bytes=1)
        self._tokens = sorted(set(range(vocab_size)) - set(files.eos_token_ids))

    def close(self) -> None:
        """Ends what the text tools started."""
        self._tools.close()

    def measure(self, num_streams: int, *, stops: Sequence[str] = ()) -> TokenCost:
        """One round of steps with a token for each of `num_streams` DELTA streams."""
        table = SlotTable()
        streams = [self._stream(slot, tuple(stops)) for slot in range(num_streams)]
        for stream in streams:
            table.allocate("bench", stream.completions)
        choices = random.Random(0)
        to_text = to_message = 0.0
        for number in range(STEPS):
            tokens = choices.choices(self._tokens, k=num_streams)
            wire = core_pb.StepOutputs(step=number, slots=range(num_streams), token_ids=tokens).SerializeToString()
            step = core_pb.StepOutputs.FromString(wire)
            begun = time.perf_counter()
            deliver_step(step, table)
            delivered = time.perf_counter()
            for message in itertools.chain.from_iterable(stream.take_messages() for stream in streams):
                message.SerializeToString()
            to_message += time.perf_counter() - delivered
            to_text += delivered - begun
        per_token = 1e6 / (STEPS * num_streams)
        return TokenCost(to_text * per_token, to_message * per_token)

    def _stream(self, slot: int, stops: tuple[str, ...]) -> RequestStream:
        child = core_pb.Child(slot=slot, seed=slot)
        request = PreparedRequest(
            request_id=str(slot),
            session_id="",
            model=self._model,
            params=SamplingParams(stop=stops),
            engine_request=core_pb.EngineCoreRequest(internal_id="bench", prompt_token_ids=[1], children=[child]),
            output_kind=pb.OUTPUT_KIND_DELTA,
            stream_interval=1,
            return_prompt_token_ids=False,
            arrival=Arrival.now(None),
        )
        return RequestStream(request, "bench", max_unsent_bytes=1 << 30)
