"""docs/build/upstream/weights-replaced-on-cpu.md"""

CANNOT = "a model is needed that an engine has loaded, with experts that vLLM has packed."
