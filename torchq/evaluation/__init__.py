"""Measuring what quantization changed."""
