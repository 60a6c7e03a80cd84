"""``python -m adaecho`` runs the command ``adaecho``."""

from adaecho.run import cli

if __name__ == "__main__":
    cli()
