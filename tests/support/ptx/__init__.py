"""An emulator of PTX: the Triton kernels executed as the code that is compiled from them.

What it shows: values as compiled code rounds them, the bytes it touches, and that no result hangs
on the order of warps and programs.  What it does not: time, and what hardware does with a race.
Modules: ``parse``, ``formats``, ``operations``, ``memory``, ``races``, ``block``, ``launch``.
"""
