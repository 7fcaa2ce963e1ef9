"""One fault of CPython, glibc, torch or vLLM per file, with the version at which it can go."""
