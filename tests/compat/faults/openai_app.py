"""The app of vLLM's server."""

CANNOT = "each needs a server that runs: tests/server shows them there."
