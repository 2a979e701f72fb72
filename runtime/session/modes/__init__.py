"""What sessions of some models can do besides: a file is an observer that `Session` asks by its class."""
