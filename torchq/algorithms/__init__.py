"""Quantization algorithms: one file each."""
