"""Fields of a request that this gateway does not know.

A newer client may ask for something that an older gateway has never heard of. protobuf keeps such fields aside;
ignoring them would answer a question that was not asked, so they are refused by number and place.
"""

from collections.abc import Iterator

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from headrace.common.errors import Violation


def unknown_fields(message: Message, path: str = "") -> list[Violation]:
    """One violation for each unknown field number and each unknown enum value, in this message and all inside it."""
    return list(_walk(message, path))


def _walk(message: Message, path: str) -> Iterator[Violation]:
    prefix = f"{path}." if path else ""
    unknown = UnknownFieldSet(message)
    for number in sorted({unknown[i].field_number for i in range(len(unknown))}):
        yield Violation(
            f"{prefix}{number}", f"field number {number} of {message.DESCRIPTOR.full_name} is not known here"
        )
    for field, value in message.ListFields():
        if field.enum_type is not None and not field.is_repeated:
            if value not in field.enum_type.values_by_number:
                yield Violation(f"{prefix}{field.name}", f"{value} is not a value of {field.enum_type.full_name}")
        elif field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE and not _is_map(field):
            if field.is_repeated:
                for position, item in enumerate(value):
                    yield from _walk(item, f"{prefix}{field.name}[{position}]")
            else:
                yield from _walk(value, f"{prefix}{field.name}")


def _is_map(field: FieldDescriptor) -> bool:
    # The entries of our maps hold scalars only.
    return bool(field.message_type is not None and field.message_type.GetOptions().map_entry)
