"""Paths in the commands of inductor."""

CANNOT = (
    "it takes a compiler and a folder for each try: tests/compat/test_compile_paths.py has them."
)
