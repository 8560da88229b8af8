"""The recipes, one experiment a file: the package flaxformer_mt.configs."""
