"""Refuses constraints that do not compile, before any core sees them."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from headrace.common.errors import Overloaded
from headrace.common.grammar_checker import GrammarChecker, Verdict
from headrace.common.grammar_rules import StructuredOutputsParams
from headrace.common.tokenizer_files import TokenizerFiles

MAX_WAITING_CHECKS = 32


class StructuredOutputsCheck:
    """For one model. Constraints that were checked before pass at once; new ones wait for each other, and for nobody
    else: not on the threads that tokenize."""

    def __init__(self, checker: GrammarChecker) -> None:
        self._checker = checker
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-checker")
        self._under_way: dict[StructuredOutputsParams, asyncio.Future[Verdict]] = {}

    @classmethod
    def from_files(cls, files: TokenizerFiles) -> "StructuredOutputsCheck":
        """The check for a tokenizer; costs nothing before its first use."""
        return cls(GrammarChecker(files.files["tokenizer.json"], None, files.eos_token_ids))

    async def __call__(self, params: StructuredOutputsParams) -> None:
        """Raises InvalidRequest with the field, and in a JSON schema the path; Overloaded if many checks wait."""
        verdict = self._checker.remembered(params)
        if verdict is None:
            # Others may wait for the same check, so it goes on when one of them leaves.
            verdict = await asyncio.shield(self._under_way.get(params) or self._begin(params))
        verdict.get()

    def _begin(self, params: StructuredOutputsParams) -> "asyncio.Future[Verdict]":
        if len(self._under_way) >= MAX_WAITING_CHECKS:
            raise Overloaded(
                f"{len(self._under_way)} new structured_outputs wait to be checked; at most {MAX_WAITING_CHECKS} may",
                reason="TOO_MANY_NEW_GRAMMARS",
            )
        check = asyncio.get_running_loop().run_in_executor(self._thread, self._checker.check, params)
        self._under_way[params] = check
        check.add_done_callback(lambda _: self._under_way.pop(params))
        return check

    def close(self) -> None:
        """Ends the checker's process and thread."""
        self._checker.close()
        self._thread.shutdown(wait=False, cancel_futures=True)
