"""`python -m atlas`: the command line."""

from atlas.cli import main

main()
