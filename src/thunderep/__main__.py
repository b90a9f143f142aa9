"""`python -m thunderep` is the `thunderep` command."""

from thunderep.cli import main

if __name__ == "__main__":
    main()
