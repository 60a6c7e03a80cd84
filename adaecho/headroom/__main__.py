"""``python -m adaecho.headroom``: would echoing help, and by how much at most?"""

from adaecho.headroom.command import cli

cli()
