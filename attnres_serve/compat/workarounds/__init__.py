"""One fault of CPython, glibc, torch or vLLM per file, with the version that no longer needs it."""
