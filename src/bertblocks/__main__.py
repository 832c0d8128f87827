"""`python -m bertblocks`."""

from bertblocks.cli.main import main

main()
