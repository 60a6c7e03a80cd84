"""Which depths the ResNets for CIFAR have; without torch, for configs."""

from adaecho.errors import ConfigError

CHANNELS = 16  # filters of the first stage; each further stage has twice as many


def check_depth(depth: int) -> int:
    """Blocks per stage n of a net of 6n + 2 layers.

    Raises:
        ConfigError: there is no net of that depth.
    """
    blocks_per_stage, rest = divmod(depth - 2, 6)
    if rest or blocks_per_stage < 1:
        raise ConfigError(f"depth={depth}: these nets have 6n + 2 layers; choose 8, 14, 20, 26, 32, 44 or 56")
    return blocks_per_stage
