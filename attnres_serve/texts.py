"""Text of files and of the standard input."""

from attnres_serve.errors import SettingError

MARK = "\ufeff"  # the byte order mark, which some editors put before a text


def decoded(content: bytes, what: str) -> str:
    """The text of a file in UTF-8, without a byte order mark; line breaks stay the same.

    Args:
        content: the whole content.
        what: its name and place, for messages.

    Raises:
        SettingError: it is in another encoding.
    """
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise SettingError(f"{what} is not in UTF-8; convert it first.") from None
    if "\0" in text:  # English in UTF-16 is UTF-8 as well, with a NUL beside every letter
        raise SettingError(f"{what} has NUL characters, as UTF-16 has; convert it to UTF-8 first.")
    return text.removeprefix(MARK)
