"""Which model this gateway serves, learned from its cores: one model, all cores alike.

The tokenizer is read from disk where the gateway was given one, else it is fetched from the first core that answers.
A core of another model or tokenizer is refused; one with another chat template is warned about.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

import grpc
import structlog

from headrace.common.errors import FailedPrecondition, NotFound, RequestError, StartupError, Unavailable
from headrace.common.params import ModelLimits, SamplingParams
from headrace.common.params_wire import sampling_from_wire
from headrace.common.rpc_status import from_rpc_error
from headrace.common.tokenizer_files import MAX_FILES, MAX_TOTAL_BYTES, TokenizerFiles
from headrace.core_api.v1 import engine_core_pb2 as core_pb
from headrace.gateway.handshake import check_facts, check_same_model
from headrace.gateway.served_model import ServedModel
from headrace.gateway.text_tools import TextTools

if TYPE_CHECKING:  # it exists for type checkers only
    from headrace.core_api.v1.engine_core_pb2_grpc import EngineCoreServiceAsyncStub

TOKENIZER_TIMEOUT_S = 60.0

log = structlog.get_logger(__name__)


class ModelCatalog:
    """Cores come in through `admit`; requests find their model through `resolve`."""

    def __init__(self, max_text_bytes: int) -> None:
        self._max_text_bytes = max_text_bytes
        self._tools: TextTools | None = None
        self._prefetched: TextTools | None = None
        self._infos: dict[str, core_pb.CoreInfo] = {}  # by core address
        self._model: ServedModel | None = None

    @property
    def name(self) -> str:
        """The served model's name; empty before the first core."""
        return self._model.name if self._model else ""

    @property
    def tokenizer_digest(self) -> str:
        """Digest of the tokenizer in use; empty if there is none yet."""
        return self._tools.digest if self._tools else ""

    def use_tools(self, tools: TextTools) -> None:
        """The gateway's own tokenizer and template, before the first core is admitted."""
        self._tools = tools

    def close(self) -> None:
        """Lets go of the tokenizer and the chat template."""
        for tools in (self._tools, self._prefetched):
            if tools is not None:
                tools.close()

    def resolve(self, name: str) -> ServedModel:
        """The model of this name, or the only one. Raises NotFound, or Unavailable before the first core."""
        if self._model is None:
            raise Unavailable("no core has connected yet, so there is no model to serve", reason="NO_CORE")
        if name and name != self._model.name:
            message = f"model {name!r} is not served here; {self._model.name!r} is"
            raise NotFound(message, field="model", reason="UNKNOWN_MODEL")
        return self._model

    async def admit(self, address: str, info: core_pb.CoreInfo, fetch: Callable[[], Awaitable[TokenizerFiles]]) -> None:
        """Takes a core in, or raises FailedPrecondition. `fetch` brings the tokenizer's files if we have none."""
        check_facts(info)
        check_same_model(info, self.name, self.tokenizer_digest)
        tools = self._tools or await self._tools_for(info, fetch)
        # Another core may have come first while the tokenizer was on its way.
        check_same_model(info, self.name, self.tokenizer_digest or tools.digest)
        if self._tools is None:
            self._tools = tools
        elif tools is not self._tools:
            tools.close()
        if info.template_digest != self._tools.template_digest:
            log.warning("the core has another chat template", core=address, model=info.model)
        self.update(address, info)

    async def prefetch(self, fetch: Callable[[], Awaitable[TokenizerFiles]]) -> None:
        """Gets the tokenizer ready while its core still loads the weights; without it, `admit` does so later."""
        if self._tools is not None or self._prefetched is not None:
            return
        try:
            self._prefetched = await _tools_from_core(await fetch())
        except RequestError:
            return  # the core is not that far yet

    def update(self, address: str, info: core_pb.CoreInfo) -> None:
        """New facts of a core that was admitted. Raises FailedPrecondition if it is no longer one of ours."""
        if self._tools is None:
            raise RuntimeError("a core must be admitted before it is updated")
        check_facts(info)
        check_same_model(info, self.name, self.tokenizer_digest)
        self._infos[address] = info
        infos = self._infos.values()
        self._model = ServedModel(
            name=info.model,
            info=info,
            limits=ModelLimits(
                vocab_size=min(i.vocab_size for i in infos),
                max_model_len=min(i.max_model_len for i in infos),
                max_logprobs=min(i.max_logprobs for i in infos),
            ),
            default_sampling=sampling_from_wire(info.default_sampling, SamplingParams()),
            tools=self._tools,
            max_text_bytes=self._max_text_bytes,
        )

    async def _tools_for(self, info: core_pb.CoreInfo, fetch: Callable[[], Awaitable[TokenizerFiles]]) -> TextTools:
        prefetched, self._prefetched = self._prefetched, None
        if prefetched is not None:
            if prefetched.digest == info.tokenizer_digest:
                return prefetched
            prefetched.close()
        return await _tools_from_core(await fetch())


async def fetch_tokenizer_files(stub: "EngineCoreServiceAsyncStub") -> TokenizerFiles:
    """The tokenizer's files from a core. Raises RequestError if they do not come whole."""
    files: dict[str, bytearray] = {}
    total = 0
    try:
        async for piece in stub.GetTokenizer(core_pb.GetTokenizerRequest(), timeout=TOKENIZER_TIMEOUT_S):
            contents = files.setdefault(piece.file_name, bytearray())
            contents += piece.data
            total += len(piece.data)
            if total > MAX_TOTAL_BYTES or len(files) > MAX_FILES:
                raise FailedPrecondition(
                    f"the core's tokenizer has more than {MAX_FILES} files or {MAX_TOTAL_BYTES} bytes"
                )
            if piece.sha256 and hashlib.sha256(contents).hexdigest() != piece.sha256:
                raise FailedPrecondition(f"the core's {piece.file_name} came with other bytes than its digest says")
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    return _checked({name: bytes(contents) for name, contents in files.items()})


def _checked(files: Mapping[str, bytes]) -> TokenizerFiles:
    try:
        return TokenizerFiles.from_files(files)
    except StartupError as error:
        raise FailedPrecondition(f"the core's tokenizer cannot be used: {error}") from error


async def _tools_from_core(files: TokenizerFiles) -> TextTools:
    try:
        return await asyncio.to_thread(TextTools.from_files, files)  # parsing a vocabulary takes a while
    except StartupError as error:
        raise FailedPrecondition(f"the core's tokenizer cannot be used: {error}") from error
