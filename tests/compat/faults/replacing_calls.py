"""docs/build/upstream/weights-replaced-on-cpu.md"""

CANNOT = "an engine is needed that has answered, and then gets other weights."
