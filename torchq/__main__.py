"""``python -m torchq``."""

from torchq.cli import main

main()
