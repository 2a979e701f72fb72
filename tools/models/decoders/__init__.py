"""Random small decoders as plain `nn.Module`s: what accel must compile though nobody registered it."""
