"""One experiment a file, `get_config() -> Config`; `flaxformer_mt.configs` where the package is installed."""
