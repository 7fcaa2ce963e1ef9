"""What is asked of a server that runs somewhere else."""

import os


def key() -> dict[str, str]:
    """The header with the key in OPENAI_API_KEY, where OpenAI's clients look; empty without one."""
    found = os.environ.get("OPENAI_API_KEY")
    return {"Authorization": f"Bearer {found}"} if found else {}
