"""m3stack: the serving stack for MiniMax-M3."""

__version__ = "0.1.0"
