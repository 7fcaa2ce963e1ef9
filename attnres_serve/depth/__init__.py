"""Depth attention as numbers: specification, sites and groups of sites."""
