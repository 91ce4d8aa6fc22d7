"""Commands of the package; the only room, besides the configuration, that knows Hydra."""
