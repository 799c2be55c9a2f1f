"""The `histocoder` command, as `python -m histocoder`."""

from histocoder.cli.main import main

if __name__ == "__main__":
    main()
