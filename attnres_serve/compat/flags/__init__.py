"""How vLLM's parser reads a command line, known without importing it."""
