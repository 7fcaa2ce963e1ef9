"""A model of the Triton kernels on a GPU, from the machine code alone: cycles, not measurements.

``docs/measure/model.md`` has its tables, and what it leaves out.
"""
