"""``python -m adaecho`` does the same as the command ``adaecho``."""

from adaecho.run import cli

if __name__ == "__main__":
    cli()
