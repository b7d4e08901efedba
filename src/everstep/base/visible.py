"""Text from elsewhere, made safe to look at. Pure.

Text of a worker, a task or a file may hold characters that a terminal obeys: escape sequences that rename its window,
move its cursor or write to its clipboard, and characters that reverse the order of others. Here these become visible.
"""

from __future__ import annotations

import re

_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
    "|[\U000e0000-\U000e007f]"
)
"""Control characters (C0 but line feed and tab, DEL, C1), characters that set the direction of writing or only
instruct, line ends of Unicode, tags, and halves of characters."""


def visible(text: str) -> str:
    """The text with control characters as escapes (`\\u001b`), valid in a JSON string, too; line feeds and tabs
    stay."""
    return text if text.isascii() and text.isprintable() else _OBEYED.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code > 0xFFFF:
        code -= 0x10000
        return f"\\u{0xD800 + (code >> 10):04x}\\u{0xDC00 + (code & 0x3FF):04x}"
    return f"\\u{code:04x}"
