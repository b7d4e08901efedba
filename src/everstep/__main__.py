"""`python -m everstep`, and what the script `everstep` calls: the door to the command line, which is quick to open."""

import sys


def main() -> None:
    """Entry point. Ctrl-C while the command line is imported is one line, too."""
    try:
        from everstep.cli.main import main as run
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr, flush=True)
        sys.exit(130)
    run()


if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # the working directory, which `-m` puts first, is no place to import from
    main()
