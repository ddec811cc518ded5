"""Calibration: what the model is shown, and what is measured while it runs block by block."""
