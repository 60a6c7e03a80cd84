"""``python -m adaecho.headroom``: would echoing help, and by how much at most?"""

from adaecho.headroom.measure import cli

cli()
