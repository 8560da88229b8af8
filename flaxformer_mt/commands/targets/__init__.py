"""`show --target`: what compilers make of a config for accelerators that are not at hand."""
