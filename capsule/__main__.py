"""``python -m capsule``."""

from capsule.cli.main import main

main()
