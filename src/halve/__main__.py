"""`python -m halve` is the command line."""

from halve.cli import main

if __name__ == "__main__":
    main()
