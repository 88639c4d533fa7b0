"""``python -m ostinato``, the command line where its script is not installed."""

from ostinato.cli import main

if __name__ == "__main__":
    main()
