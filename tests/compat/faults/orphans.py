"""Processes that outlive a killed server."""

CANNOT = "several processes are needed, and the time in which one of them does not end."
