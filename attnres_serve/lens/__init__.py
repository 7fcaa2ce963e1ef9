"""Those who ask for traces: a client, Python, the command, and figures of the answers."""
