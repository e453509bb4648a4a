"""legorl: reinforcement learning for coding agents through unmodified harnesses."""

__version__ = "0.1.0"
