"""Read the rows of prepared sets of older schema versions.

Version 3 has one image a row and messages of plain text. Version 4 has neither spans of texts nor
channels of media. Version 5 has no columns of texts.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

_REF = pa.struct([("file", pa.string()), ("offset", pa.int64()), ("length", pa.int64())])
_SCHEMA_3 = pa.schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("image", pa.binary(), nullable=False),
        pa.field("texts", pa.list_(pa.string()), nullable=False),
        ("label", pa.int64()),
        ("split", pa.string()),
        ("language", pa.string()),
        pa.field("source", pa.string(), nullable=False),
        pa.field("sha256", pa.string(), nullable=False),
        ("boxes", pa.list_(pa.list_(pa.float32(), 4))),
        ("box_labels", pa.list_(pa.int64())),
        ("ref", _REF),
        ("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
    ]
)


def schemas(current: pa.Schema) -> dict[int, pa.Schema]:
    """Return the schema of the shards of each older version.

    Args:
        current: The schema of the current version.
    """
    schema_5 = current.remove(current.get_field_index("text_columns"))
    media = current.field("media")
    without_channels = [field for field in media.type.value_type if field.name != "channels"]
    media_4 = pa.field("media", pa.list_(pa.struct(without_channels)), nullable=media.nullable)
    schema_4 = schema_5.remove(schema_5.get_field_index("spans"))
    schema_4 = schema_4.set(schema_4.get_field_index("media"), media_4)
    return {3: _SCHEMA_3, 4: schema_4, 5: schema_5}


def upgrade_3(values: dict[str, Any]) -> dict[str, Any]:
    """Convert a stored row of schema version 3 to the current schema.

    The image becomes the only entry of `media` (list of images), with unknown width and height. In
    a conversation, an image part is put before the first user message.

    Args:
        values: Values of the row by the columns of version 3; `image`, `ref`, `sha256` and
            `messages` are removed from it.

    Returns:
        Values by the columns of the current schema.
    """
    image, ref, sha256 = (values.pop(name) for name in ("image", "ref", "sha256"))
    media = {"kind": "image", "data": image, "ref": ref, "sha256": sha256}
    messages = values.pop("messages")
    is_placed = False
    for message in messages or ():
        text = message["content"]
        message["content"] = [{"type": "text", "text": text}] if text else []
        if message["role"] == "user" and not is_placed:
            message["content"].insert(0, {"type": "image", "text": None})
            is_placed = True
    if messages and not is_placed:  # a conversation of the assistant alone
        messages.insert(0, {"role": "user", "content": [{"type": "image", "text": None}]})
    return values | {"media": [media], "messages": messages}
