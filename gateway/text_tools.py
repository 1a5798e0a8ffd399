"""A model's tokenizer, chat template and check of structured outputs, ready to use."""

from dataclasses import dataclass

from headrace.common.tokenizer_files import TokenizerFiles
from headrace.gateway.chat_template import ChatTemplate
from headrace.gateway.structured_outputs import StructuredOutputsCheck
from headrace.gateway.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextTools:
    """Built once for each model; the digests tell whether a core has the same."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    structured_outputs: StructuredOutputsCheck
    longest_token_bytes: int
    digest: str
    template_digest: str

    @classmethod
    def from_files(cls, files: TokenizerFiles) -> "TextTools":
        """Takes some tenths of a second. Raises StartupError if the files do not make a tokenizer."""
        tokenizer = Tokenizer.from_files(files)
        return cls(
            tokenizer=tokenizer,
            chat_template=ChatTemplate.from_files(files),
            structured_outputs=StructuredOutputsCheck.from_files(files),
            longest_token_bytes=max(map(len, tokenizer.pieces(skip_special_tokens=False))),
            digest=files.digest,
            template_digest=files.template_digest,
        )

    def close(self) -> None:
        """Ends the processes of the chat template and of the structured outputs' check."""
        self.structured_outputs.close()
        if self.chat_template is not None:
            self.chat_template.close()
