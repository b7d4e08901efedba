"""`python -m everstep` is `everstep`: the working directory, which `-m` puts first, is no place to import from."""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]
    from everstep.cli.main import main

    main()
