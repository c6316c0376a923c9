"""``python -m raydp``: the command line under an interpreter of one's choice."""

from raydp.cli import main

if __name__ == "__main__":
    main()
