"""The only room that asks vLLM: hooks, objects and what differs between its versions."""
