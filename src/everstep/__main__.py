"""`python -m everstep` is `everstep`."""

from everstep.cli.main import main

if __name__ == "__main__":
    main()
