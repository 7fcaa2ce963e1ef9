"""Whole models, served."""
