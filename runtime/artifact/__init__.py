"""The folder that a build writes: its manifest, its checks, how it is written whole or not at all."""
